"""The engine's cache as seen from outside the engine thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.accounts import Account, AccountStats
from radixkv.dump import Survey
from radixkv.identity.identity import CacheIdentity
from radixkv.nodes import Node
from radixkv.service.engine.cache_events import CacheEvents, Listener
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.explaining import Explained, explain
from radixkv.service.engine.history import History
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.stats import CacheStats
from radixkv.tokens import encode

if TYPE_CHECKING:
    from radixkv.dump import Dump
    from radixkv.residency import Histogram

MAX_COUNTED_NODES = 50_000
"""A tree of more nodes is not walked to count what it wastes: that would hold up a step."""


@dataclass(frozen=True, slots=True)
class Waste:
    """What of the pool and of the host's memory holds no token that anybody can use."""

    reserved_tokens: int
    """Room in blocks of running sequences that is still to be written."""
    tail_tokens: int
    """Room behind the tails of cached paths."""
    metadata_bytes: int | None
    """Host memory of the tree: nodes, their tokens and block ids; an estimate. None where there are
    too many to be counted."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What cannot be had without a look between two steps, all of one moment."""

    accounts: tuple[AccountStats, ...]
    waste: Waste

    def account(self, tenant: str) -> AccountStats | None:
        """Return one tenant's account; None if it never asked."""
        return next((a for a in self.accounts if a.tenant == tenant), None)


class CacheView:
    """Look into the cache, or empty it. All that is a method waits for the end of a step, but
    ``stats`` and ``listen``."""

    def __init__(self, core: EngineCore, identity: Callable[[Origin], CacheIdentity]) -> None:
        self._core = core
        self._identity = identity
        self._inside: tuple[float, Inside] | None = None

    def stats(self) -> CacheStats:
        """What was asked for, found, kept and evicted, as of the last step; never waits."""
        return self._core.stats.cache

    @property
    def history(self) -> History:
        """What was asked and found in the last minutes and hours; never waits."""
        return self._core.counters.observer.history

    @property
    def residency(self) -> Mapping[str, Histogram]:
        """How long blocks stay (``lifetime``), were idle when they went (``idle``), how soon they
        were used again (``reuse_gap``): in seconds, as of a second ago or less; never waits."""
        return self._core.counters.observer.residency

    @property
    def residency_quantiles(self) -> Mapping[str, Mapping[float, float | None]]:
        """Quantiles of the same; empty before anything was looked up."""
        return self._core.counters.observer.quantiles

    def listen(self, tenants: Collection[str] | None) -> Listener:
        """Hear of what happens in the cache from now on, on the running event loop; never waits.

        Of ``tenants`` alone, or of all if None. To be ended by ``stop_listening``.
        """
        listener = self._events.listen(tenants)
        # What is there already is no event: note it before the next step.
        self._core.call(lambda: self._events.step(self._core.cache))
        return listener

    def stop_listening(self, listener: Listener) -> None:
        """End listening; never waits."""
        self._events.stop(listener)

    def lookup(self, token_ids: Sequence[int], *, origin: Origin = LOCAL) -> int:
        """Tokens that a request with this prompt, sent now, would find; touches nothing."""
        tokens, identity = encode(token_ids), self._identity(origin)
        return self._core.call(lambda: self._core.cache.lookup(identity, tokens)).result()

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        origin: Origin = LOCAL,
        may_read: bool = True,
        every_salt: bool = False,
    ) -> Explained:
        """Why a request with this prompt, sent now, would not find all of it; touches nothing.

        ``may_read``: False for a request that reads nothing from the cache, as one that wants the
        log-probabilities of its prompt. ``every_salt``: tell an admin who has a salt what other
        salts of the tenant have.
        """
        tokens, identity = encode(token_ids), self._identity(origin)
        scheduler = self._core.scheduler
        return self._core.call(
            lambda: explain(scheduler, identity, tokens, may_read=may_read, every_salt=every_salt)
        ).result()

    def tree(
        self, tenants: Collection[str] | None, *, depth: int, limit: int, token_ids: int = 0
    ) -> Dump:
        """Nodes for drawing, of ``tenants`` or of all if None; ``token_ids`` of each are told."""
        cache = self._core.cache
        survey = self._core.call(lambda: Survey(cache, tenants)).result()
        return survey.draw(depth=depth, limit=limit, token_ids=token_ids)  # holds up no step

    def inside(self, max_age_s: float = 2.0) -> Inside:
        """What a look between two steps shows, not older than ``max_age_s`` seconds."""
        kept = self._inside
        if kept is not None and time.monotonic() - kept[0] < max_age_s:
            return kept[1]
        found = self._core.call(self._look).result()
        self._inside = time.monotonic(), found
        return found

    def reset(self) -> int:
        """Forget everything; returns the blocks freed. Raises CacheBusy while requests run."""
        return self._core.call(self._core.cache.reset).result()

    @property
    def _events(self) -> CacheEvents:
        return self._core.counters.observer.events

    def _look(self) -> Inside:
        cache, size = self._core.cache, self._core.cache.block_size
        tables = [seq.table for seq in self._core.scheduler.running if seq.table is not None]
        reserved = sum(table.num_blocks * size - table.num_tokens for table in tables)
        stats = cache.stats()
        small = stats.nodes <= MAX_COUNTED_NODES
        return Inside(
            accounts=tuple(cache.account(a.tenant) for a in [*cache.accounts]),
            waste=Waste(
                reserved_tokens=reserved,
                tail_tokens=stats.cached_blocks * size - stats.cached_tokens,
                metadata_bytes=_metadata_bytes(cache.accounts) if small else None,
            ),
        )


def _metadata_bytes(accounts: Iterable[Account]) -> int:
    """Return the bytes of host memory that all nodes of ``accounts`` take. O(nodes)."""
    size = 0
    stack: list[Node] = [root for account in accounts for root in account.roots]
    while stack:
        node = stack.pop()
        size += sys.getsizeof(node) + sys.getsizeof(node.key) + sys.getsizeof(node.blocks)
        if node.children:
            size += sys.getsizeof(node.children)
            stack.extend(node.children.values())
    return size
