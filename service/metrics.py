"""Shows an engine's counters, and the times of requests, to Prometheus.

Counters are read from the engine's last snapshot when somebody scrapes, so a scrape never waits for
a step, and what is counted is counted in one place. Units are tokens, blocks and seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from radixkv.service.tenant_metrics import TenantCounters

if TYPE_CHECKING:
    from radixkv.service.engine.counters import EngineStats
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.stream import Stream

PREFIX = "radixkv:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_TIMES = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two events of a streamed choice.", _STEP_SECONDS),
    "request_time_per_output_token_seconds": (
        "Decode time of a request by its tokens after the first.",
        _STEP_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("From submission to first admission.", _SECONDS),
    "request_prefill_time_seconds": ("From first admission to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a request's choices.", _TOKENS),
}

_RESIDENCY = {
    "kv_block_lifetime_seconds": ("lifetime", "From publication to eviction; sampled."),
    "kv_block_idle_before_evict_seconds": ("idle", "From the last use to eviction; sampled."),
    "kv_block_reuse_gap_seconds": (
        "reuse_gap",
        "From the last use of a block until it was found again; sampled.",
    ),
}


class Metrics:
    """One server's registry. Histograms are fed by the event loop, counters read at a scrape."""

    def __init__(self, *, vllm_names: bool = False, by_tenant: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._shown = _Shown(self.registry, vllm_names=vllm_names)
        self._answers = Counter(
            PREFIX + "http_responses",
            "Answers by route and status; 499 is a client that hung up.",
            ("route", "status"),
            registry=self.registry,
        )
        self._times: dict[str, Histogram] = {}
        self.tenants = TenantCounters(self.registry, PREFIX) if by_tenant else None
        """None: there is one tenant, whose numbers are the engine's."""

    def attach(self, engine: Engine) -> None:
        """Begin to show ``engine``; once."""
        name = engine.model_name
        for metric, (text, buckets) in _TIMES.items():
            self._times[metric] = Histogram(
                PREFIX + metric, text, ("model_name",), registry=self.registry, buckets=buckets
            ).labels(name)
        self.registry.register(EngineCollector(engine))

    def count_answer(self, route: str, status: int) -> None:
        """Count one HTTP answer; ``route`` is the pattern, not the path, so labels stay few."""
        self._answers.labels(route, str(status)).inc()

    def observe(self, stream: Stream, arrived_s: float) -> None:
        """Record the times of a request that is finished; ``arrived_s`` is when HTTP saw it."""
        first, last, admitted = stream.first_token_s, stream.finished_s, stream.admitted_s
        if first is None or last is None or admitted is None:
            return
        usage = stream.usage
        times = {
            "time_to_first_token_seconds": first - arrived_s,
            "e2e_request_latency_seconds": last - arrived_s,
            "request_queue_time_seconds": admitted - stream.arrived_s,
            "request_prefill_time_seconds": first - admitted,
            "request_decode_time_seconds": last - first,
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
        }
        per_choice = usage.completion_tokens / stream.num_choices
        if per_choice > 1:
            times["request_time_per_output_token_seconds"] = (last - first) / (per_choice - 1)
        for name, value in times.items():
            self._times[name].observe(value)

    def observe_gap(self, seconds: float) -> None:
        """Record the time between two events of one streamed choice."""
        self._times["inter_token_latency_seconds"].observe(seconds)

    def expose(self) -> bytes:
        """Return all of it as ``CONTENT_TYPE``.

        Only the classic text: the client library's OpenMetrics text turns the colon of our names,
        which both formats allow, into an underscore.
        """
        return generate_latest(self._shown)


class EngineCollector(Collector):
    """Reads one engine's snapshot at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every counter and gauge as of the engine's last step."""
        stats, config, model = self._engine.stats(), self._engine.config, self._engine.model_name
        cache = stats.cache
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up.", cache.queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found, whole blocks or not.", cache.hit_tokens),
            "prefix_cache_partial_hits": (
                "Found tokens that ended inside a block.",
                cache.partial_hit_tokens,
            ),
            "prompt_tokens": ("Prompt tokens of admitted requests.", stats.prompt_tokens_total),
            "prompt_tokens_cached": (
                "Those that came from the cache.",
                stats.prompt_tokens_cached_total,
            ),
            "prompt_tokens_found_later": (
                "Those that others computed while the request was preempted.",
                stats.prompt_tokens_found_later_total,
            ),
            "prompt_tokens_computed": (
                "Those that were computed, once each.",
                stats.prompt_tokens_computed_total,
            ),
            "recomputed_tokens": (
                "Tokens computed again after a preemption.",
                stats.recomputed_tokens_total,
            ),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens_total),
            "num_preemptions": ("Running sequences put back.", stats.preemptions_total),
            "requests_rejected": ("Requests refused for a full queue.", stats.rejected_total),
            "requests_failed": ("Requests ended by an error.", stats.failed_total),
            "evicted_blocks": ("Cached blocks given up for others.", cache.evicted_blocks),
            "published_blocks": ("Blocks that entered the cache.", cache.published_blocks),
            "cow_copies": ("Blocks copied before a write.", cache.cow_copies),
            "cache_resets": ("Times that the cache was emptied.", cache.resets),
            "engine_steps": ("Forward passes.", stats.steps_total),
            "invariant_violations": ("Broken invariants; a bug.", stats.violations_total),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            counter.add_metric((model,), value)
            yield counter
        sources = CounterMetricFamily(
            PREFIX + "prompt_tokens_by_source",
            "Prompt tokens of admitted requests by where their KV came from.",
            labels=("model_name", "source"),
        )
        found = stats.prompt_tokens_cached_total + stats.prompt_tokens_found_later_total
        sources.add_metric((model, "local_compute"), stats.prompt_tokens_computed_total)
        sources.add_metric((model, "local_cache_hit"), found)
        yield sources
        yield from _of_preemptions(stats, model)
        for name, (series, text) in _RESIDENCY.items():
            histogram = self._engine.cache.residency.get(series)
            if histogram is None:
                continue
            family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
            buckets = [
                (str(bound), float(n))
                for bound, n in zip(histogram.bounds_s, histogram.counts, strict=True)
            ]
            family.add_metric(
                (model,), [*buckets, ("+Inf", float(histogram.count))], histogram.sum_s
            )
            yield family
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests ended, by reason.",
            labels=("model_name", "finished_reason"),
        )
        for reason in sorted({"stop", "length", "abort", *stats.finished}):
            finished.add_metric((model, reason), stats.finished.get(reason, 0))
        yield finished
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Sequences in the batch.", stats.num_running),
            "num_requests_waiting": ("Sequences in the queue.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of blocks held by running requests, 0 to 1.",
                stats.used_blocks / max(stats.num_blocks, 1),
            ),
            "engine_alive": ("Whether the engine serves.", int(self._engine.alive)),
        }
        for name, (text, level) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((model,), level)
            yield gauge
        blocks = GaugeMetricFamily(
            PREFIX + "kv_blocks", "Blocks by state.", labels=("model_name", "state")
        )
        blocks.add_metric((model, "free"), stats.free_blocks)
        blocks.add_metric((model, "cached"), stats.cached_blocks)
        blocks.add_metric((model, "used"), stats.used_blocks)
        yield blocks
        about = {
            "block_size": config.block_size,
            "num_gpu_blocks": stats.num_blocks,
            "cache_dtype": self._engine.dtype,
            "device": self._engine.device,
            "enable_prefix_caching": config.prefix_cache,
            "max_model_len": self._engine.max_model_len,
            "decoder": self._engine.decoder,
            "deterministic": config.deterministic,
        }
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "How the cache is laid out; the value is always 1.",
            labels=("model_name", *about),
        )
        info.add_metric((model, *map(str, about.values())), 1)
        yield info


def _of_preemptions(stats: EngineStats, model: str) -> Iterator[Metric]:
    """What became of the KV of sequences that were put back."""
    kinds = CounterMetricFamily(
        PREFIX + "preemptions_by_kind",
        "Running sequences put back: their KV kept in host memory, or lost where not cached.",
        labels=("model_name", "kind"),
    )
    for kind, number in stats.preemptions.items():
        kinds.add_metric((model, kind), number)
    yield kinds
    moved = {
        "swapped_tokens": (
            "Tokens whose KV was copied to host memory, or back.",
            stats.swapped_out_tokens_total,
            stats.swapped_in_tokens_total,
        ),
        "swapped_bytes": (
            "Bytes of KV copied to host memory, or back.",
            stats.swapped_out_bytes_total,
            stats.swapped_in_bytes_total,
        ),
    }
    for name, (text, out, back) in moved.items():
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name", "direction"))
        family.add_metric((model, "out"), out)
        family.add_metric((model, "in"), back)
        yield family
    host = {
        "swap_used_bytes": ("Host memory that preempted sequences take.", stats.swap_used_bytes),
        "swap_capacity_bytes": ("Host memory that they may take.", stats.swap_capacity_bytes),
    }
    for name, (text, level) in host.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
        gauge.add_metric((model,), level)
        yield gauge


_VLLM = (frozenset(_TIMES) | frozenset(_RESIDENCY)) | {
    "prompt_tokens_by_source",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "num_preemptions",
    "request_success",
    "cache_config_info",
}
"""What vLLM has by the same name and in the same unit."""


class _Shown(Collector):
    """What a scrape shows of a registry: no creation times, and vLLM's names too if wanted."""

    def __init__(self, registry: CollectorRegistry, *, vllm_names: bool) -> None:
        self._registry = registry
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            # A gauge for each series that says when it began: twice the lines, and unused.
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
            name = metric.name.removeprefix(PREFIX)
            if self._vllm_names and name in _VLLM:
                twin = Metric("vllm:" + name, metric.documentation, metric.type)
                twin.samples = [
                    s._replace(name="vllm:" + s.name.removeprefix(PREFIX)) for s in metric.samples
                ]
                yield twin
