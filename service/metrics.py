"""What a scrape shows to Prometheus: an engine's counters, the times of requests, HTTP's answers.

Knows when requests came and ended, and what vLLM calls the same; the engine's own numbers are in
engine_metrics.py. Units are tokens, blocks and seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from radixkv.service.engine_metrics import PREFIX, RESIDENCY, EngineCollector
from radixkv.service.tenant_metrics import TenantCounters

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.stream import Stream

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


_VLLM = (frozenset(_TIMES) | frozenset(RESIDENCY)) | {
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
    "iteration_tokens_total",
    "lora_requests_info",
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
