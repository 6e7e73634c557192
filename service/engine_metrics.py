"""Shows an engine's counters to Prometheus.

They are read from the engine's last snapshot when somebody scrapes, so a scrape never waits for a
step, and what is counted is counted in one place. Units are tokens, blocks and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from radixkv.service.engine.counters import STEP_SIZES

if TYPE_CHECKING:
    from radixkv.service.engine.counters import EngineStats
    from radixkv.service.engine.engine import Engine

PREFIX: Final = "radixkv:"

RESIDENCY = {
    "kv_block_lifetime_seconds": ("lifetime", "From publication to eviction; sampled."),
    "kv_block_idle_before_evict_seconds": ("idle", "From the last use to eviction; sampled."),
    "kv_block_reuse_gap_seconds": (
        "reuse_gap",
        "From the last use of a block until it was found again; sampled.",
    ),
}


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
        for name, (series, text) in RESIDENCY.items():
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
        yield _of_steps(stats, model)
        if self._engine.adapters.all():
            yield self._of_adapters()
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

    def _of_adapters(self) -> Metric:
        """Who is asked for, for routers that send requests to where their adapter is."""
        running, waiting = self._engine.adapters_asked()
        info = GaugeMetricFamily(
            PREFIX + "lora_requests_info",
            "Adapters that requests run with, and wait for; the value is the time, in seconds.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        names = ",".join(sorted(running)), ",".join(sorted(waiting))
        # As many as are loaded may run together.
        info.add_metric((str(len(self._engine.adapters.all())), *names), time.time())
        return info


def _of_steps(stats: EngineStats, model: str) -> Metric:
    """How many tokens steps have computed."""
    family = HistogramMetricFamily(
        PREFIX + "iteration_tokens_total",
        "Tokens of a forward pass, of prompts and generated ones.",
        labels=("model_name",),
    )
    sums = [*accumulate(stats.step_sizes)]
    bounds = [*map(str, map(float, STEP_SIZES)), "+Inf"]
    buckets = [(bound, float(n)) for bound, n in zip(bounds, sums, strict=True)]
    family.add_metric((model,), buckets, stats.step_tokens_total)
    return family


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
