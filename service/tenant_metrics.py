"""Counts what each tenant asked and got, for Prometheus; for a server whose callers have keys.

Knows names and numbers. The number of label values is bounded: the first tenants that ask have
their own, those after them are counted together, and a name keeps its label while the server runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

if TYPE_CHECKING:
    from radixkv.service.engine.params import Usage

MAX_TENANTS = 100
OTHER = "other"
"""The label of all tenants beyond the first."""


class TenantCounters:
    """Counters by tenant, fed by the event loop. Tokens and calls since the start."""

    def __init__(
        self, registry: CollectorRegistry, prefix: str, *, max_tenants: int = MAX_TENANTS
    ) -> None:
        self._max_tenants = max_tenants
        self._own: set[str] = set()

        def counter(name: str, text: str, *more: str) -> Counter:
            labels = ("tenant", *more)
            return Counter(f"{prefix}tenant_{name}", text, labels, registry=registry)

        self._calls = counter("requests", "Calls with a key of the tenant.")
        self._refused = counter("refused", "Calls answered 429, by the limit met.", "limit")
        self._prompt = counter("prompt_tokens", "Prompt tokens submitted.")
        self._cached = counter("prompt_tokens_cached", "Those that came from the cache.")
        self._generated = counter("generation_tokens", "Tokens generated.")

    def count_call(self, tenant: str) -> None:
        """Count a call that was let in."""
        self._calls.labels(self._label(tenant)).inc()

    def count_refusal(self, tenant: str, limit: str) -> None:
        """Count a 429."""
        self._refused.labels(self._label(tenant), limit).inc()

    def count_usage(self, tenant: str, usage: Usage) -> None:
        """Count a prompt and its answer, when it is over."""
        label = self._label(tenant)
        self._prompt.labels(label).inc(usage.prompt_tokens)
        self._cached.labels(label).inc(usage.cached_tokens)
        self._generated.labels(label).inc(usage.completion_tokens)

    def _label(self, tenant: str) -> str:
        if tenant not in self._own:
            if len(self._own) >= self._max_tenants:
                return OTHER
            self._own.add(tenant)
        return tenant
