"""What happens in the cache, as counts, to those who listen; nothing is done while nobody does.

Knows tenants, names of events and numbers; never text, tokens or ids of anything. The engine thread
writes; each listener has a bounded queue, and is told how much it missed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

Kind = Literal["stored", "hit", "evicted", "pinned", "unpinned", "expired", "preempted", "cleared"]
QUEUE: Final = 1024
"""Events that wait for one listener; more are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened in a tenant's part of the cache. ``counts`` have units in names."""

    kind: Kind
    tenant: str
    time_s: float
    """Seconds since the epoch."""
    counts: dict[str, int]


class Listener:
    """One client's queue. ``take`` and ``ready`` are for its event loop, ``put`` for the hub."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tenants: Collection[str] | None, limit: int
    ) -> None:
        """``tenants``: whose events it may see; None: everybody's."""
        self.tenants = tenants
        self.ready = asyncio.Event()
        self._loop = loop
        self._limit = limit
        self._lock = threading.Lock()
        self._events: deque[CacheEvent] = deque()
        self._dropped = 0
        self._woken = False

    def put(self, event: CacheEvent) -> None:
        """Queue an event, or drop it if the queue is full. Never waits."""
        if self.tenants is not None and event.tenant not in self.tenants:
            return
        with self._lock:
            if len(self._events) >= self._limit:
                self._dropped += 1
                return
            self._events.append(event)
            wake, self._woken = not self._woken, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self.ready.set)
            except RuntimeError:  # the loop was closed: nobody listens any more
                return

    def take(self) -> tuple[list[CacheEvent], int]:
        """Return what has come since the last time, and how many events were dropped since."""
        with self._lock:
            events, dropped = list(self._events), self._dropped
            self._events.clear()
            self._dropped, self._woken = 0, False
            self.ready.clear()
        return events, dropped


@dataclass(slots=True)
class _Seen:
    """The numbers of one account as they were told last."""

    blocks: int = 0
    suffered: int = 0
    pinned: int = 0


class CacheEvents:
    """Tells listeners what a step has changed. O(1) a step without listeners, O(accounts) with."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] | None = None
        self._resets = 0

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listen(self, tenants: Collection[str] | None, *, limit: int = QUEUE) -> Listener:
        """Begin to listen, on the running event loop; ``stop`` ends it."""
        listener = Listener(asyncio.get_running_loop(), tenants, limit)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return listener

    def stop(self, listener: Listener) -> None:
        """End listening."""
        with self._lock:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

    # -- the engine thread -------------------------------------------------------------------------

    def tell(self, kind: Kind, tenant: str, **counts: int) -> None:
        """Tell of an event, now."""
        if not self._listeners:
            return
        event = CacheEvent(kind, tenant, self._clock(), counts)
        for listener in self._listeners:
            listener.put(event)

    def step(self, cache: PrefixCache) -> None:
        """Tell what has come and gone in each account since the last step."""
        if not self._listeners:
            self._seen = None
            return
        resets = cache.stats().resets
        seen = self._seen
        now = {
            tenant: _Seen(account.blocks, account.evicted_suffered, account.pinned_blocks)
            for tenant in [account.tenant for account in cache.accounts]
            if tenant is not None and (account := cache.account(tenant))
        }
        self._seen = now
        cleared, self._resets = resets != self._resets, resets
        if seen is None:  # the first step that somebody hears of
            return
        for tenant, mine in now.items():
            before = seen.get(tenant, _Seen())
            if cleared:
                self.tell("cleared", tenant, blocks=before.blocks)
                before.blocks = 0
            evicted = mine.suffered - before.suffered
            stored = mine.blocks - before.blocks + evicted
            if stored > 0:
                self.tell("stored", tenant, blocks=stored)
            if evicted > 0:
                self.tell("evicted", tenant, blocks=evicted)
            if mine.pinned > before.pinned:
                self.tell("pinned", tenant, blocks=mine.pinned - before.pinned)
            elif mine.pinned < before.pinned:
                self.tell("unpinned", tenant, blocks=before.pinned - mine.pinned)
