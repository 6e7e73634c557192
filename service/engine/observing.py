"""Tells history and listeners what the engine thread did, at the few places where it is known.

Knows requests and the cache's accounts; computes nothing. Every call is O(1), but for a look at how
long blocks stay, and at all accounts if something was evicted: once a second and at rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from radixkv.service.engine.cache_events import CacheEvents
from radixkv.service.engine.history import History

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.pin import Pin
    from radixkv.residency import Histogram
    from radixkv.service.engine.request import Request, Sequence

_EVERY_S = 1.0
SERIES: Final = ("lifetime", "idle", "reuse_gap")
"""Of residency: what it calls its distributions."""


@dataclass(slots=True)
class _Evicted:
    """What an account had suffered and caused when we looked last."""

    suffered: int = 0
    caused: int = 0


class Observer:
    """The engine thread's own; ``history`` and ``events`` may be used by anybody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.history = History(clock)
        self.events = CacheEvents()
        self._clock = clock
        self.residency: Mapping[str, Histogram] = {}
        """How long blocks stay and return, as of the last look; each reading is a new mapping."""
        self.quantiles: Mapping[str, Mapping[float, float | None]] = {}
        self._looked_s = 0.0
        self._state = (0, 0)
        self._evicted: dict[str, _Evicted] = {}

    def admitted(self, request: Request, found_tokens: int) -> None:
        """``request`` starts for the first time, with ``found_tokens`` from the cache."""
        origin, queried = request.origin, len(request.prompt_ids)
        self.history.add(
            origin.tenant,
            request.identity,
            origin.cache_key,
            requests=1,
            queried_tokens=queried,
            hit_tokens=found_tokens,
        )
        self.events.tell("hit", origin.tenant, tokens=found_tokens, queried_tokens=queried)

    def missed(self, request: Request, reasons: Mapping[str, int]) -> None:
        """``request`` starts for the first time; so much of its prompt was not found, and why."""
        self.history.add_missed(request.origin.tenant, reasons)

    def found_later(self, request: Request, tokens: int) -> None:
        """``request`` came back and found prompt tokens that others have computed meanwhile."""
        if tokens:
            self._add(request, found_later_tokens=tokens)

    def computed(self, request: Request, new: int, again: int) -> None:
        """Prompt tokens were computed, and tokens that had been computed before."""
        if new or again:
            self._add(request, computed_tokens=new, recomputed_tokens=again)

    def restored(self, request: Request, tokens: int) -> None:
        """Tokens of ``request`` were copied back from host memory, where a preemption put them."""
        self._add(request, restored_tokens=tokens)

    def preempted(self, seq: Sequence) -> None:
        """A running sequence was put back."""
        self._add(seq.request, preemptions=1)
        self.events.tell("preempted", seq.request.origin.tenant, tokens=seq.num_tokens)

    def finished(self, request: Request) -> None:
        """``request`` is over, well or badly."""
        if request.completion_tokens:
            self._add(request, generated_tokens=request.completion_tokens)

    def step(self, cache: PrefixCache, *, idle: bool = True) -> None:
        """A step is over; ``idle``: and nothing is left to do, so what is seen now will stay."""
        self.events.step(cache)
        state = cache.tree.num_evicted, cache.tree.clock
        now_s = self._clock()
        if state == self._state or (not idle and now_s - self._looked_s < _EVERY_S):
            return
        self._looked_s = now_s
        self._look_at_residency(cache)
        if state[0] != self._state[0]:
            self._count_evictions(cache)
        self._state = state

    def _look_at_residency(self, cache: PrefixCache) -> None:
        residency = cache.residency
        counts = (residency.lifetime.count, residency.idle.count, residency.reuse_gap.count)
        if self.residency and counts == tuple(h.count for h in self.residency.values()):
            return  # few look-ups and evictions are sampled, and to sum them up takes a while
        self.residency = {name: residency.histogram(name) for name in SERIES}
        self.quantiles = residency.quantiles()

    def _count_evictions(self, cache: PrefixCache) -> None:
        for tenant in [account.tenant for account in cache.accounts]:
            if tenant is None:
                continue
            account = cache.account(tenant)
            before = self._evicted.setdefault(tenant, _Evicted())
            suffered = account.evicted_suffered - before.suffered
            caused = account.evicted_caused - before.caused
            before.suffered, before.caused = account.evicted_suffered, account.evicted_caused
            if suffered > 0 or caused > 0:
                self.history.add_blocks(tenant, suffered=suffered, caused=caused)

    def expired(self, pin: Pin) -> None:
        """A pin was let go because nobody used it for its time."""
        self.events.tell("expired", pin.owner, blocks=pin.num_blocks)

    def clear(self) -> None:
        """Begin again, as after the warm-up."""
        self.history.clear()
        self.residency, self.quantiles = {}, {}
        self._state = (0, 0)
        self._evicted.clear()

    def _add(self, request: Request, **counts: int) -> None:
        origin = request.origin
        self.history.add(origin.tenant, request.identity, origin.cache_key, **counts)
