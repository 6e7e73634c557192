"""The engine's books: what is counted as others see it, and the proofs that nothing is lost.

Knows counters and how many blocks and bytes are held; nothing of what becomes of a request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from radixkv.service.engine.counters import Counters, EngineStats, TenantStats

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.service.engine.origin import Origin
    from radixkv.service.engine.scheduler import Scheduler
    from radixkv.service.engine.swap import Swapper

log = logging.getLogger("radixkv.engine")


class Books:
    """Kept by the engine thread only, between two steps."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        counters: Counters,
        swapper: Swapper | None,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._counters = counters
        self._swapper = swapper
        self._by_tenant: dict[str, TenantStats] = {}

    def snapshot(self) -> EngineStats:
        """Return the counts as they are now; what was returned before stays as it was."""
        scheduler = self._scheduler
        changed = scheduler.settle()
        if changed:
            shown = self._by_tenant.copy()  # who has the last snapshot keeps it as it was
            for tenant in changed:
                shown[tenant] = TenantStats.of(scheduler.fairness.of(tenant))
            self._by_tenant = shown
        host = self._swapper.pool if self._swapper is not None else None
        return self._counters.snapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache=self._cache.stats(),
            pinned_blocks=self._cache.pins.num_blocks,
            by_tenant=self._by_tenant,
            swap_used_bytes=0 if host is None else host.used_bytes,
            swap_capacity_bytes=0 if host is None else host.capacity_bytes,
        )

    def count_refused(self, origin: Origin) -> None:
        """A request was refused for a full queue."""
        self._counters.rejected += 1
        account = self._scheduler.fairness.account(origin.tenant, origin.batch)
        account.rejected += 1
        self._scheduler.fairness.changed.add(account)

    def clear(self) -> None:
        """Begin again from 0, as if nothing had been asked yet. For an engine at rest."""
        self._cache.clear_counters()
        self._counters.clear()
        self._scheduler.fairness.clear()
        self._by_tenant = {}

    def check_at_rest(self) -> None:
        """With nothing running every block must be free, cached or pinned; O(1)."""
        stats, pinned = self._cache.stats(), self._cache.pins.num_blocks
        if self._swapper is not None and self._swapper.pool.used_bytes:
            self.report([f"at rest {self._swapper.pool.used_bytes} bytes of host memory are taken"])
        if stats.free_blocks + stats.evictable_blocks + pinned != stats.num_blocks:
            self.report(
                [
                    f"at rest {stats.free_blocks} blocks are free, {stats.evictable_blocks} cached "
                    f"and {pinned} pinned, of {stats.num_blocks}"
                ]
            )

    def check(self) -> list[str]:
        """Return each broken invariant in words, and count and log it. O(blocks)."""
        found = self._cache.check() + self._scheduler.check()
        self.report(found)
        return found

    def report(self, violations: list[str]) -> None:
        """A broken invariant is counted and logged; it does not stop the service (LEAK-2)."""
        self._counters.violations += len(violations)
        for line in violations:
            log.error("broken invariant: %s", line)
