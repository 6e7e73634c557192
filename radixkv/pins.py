"""Pins: prefixes that owners asked to keep resident, for how long, and at the cost of whose budget.

Knows owners, budgets in blocks and a clock in seconds; nothing of requests, or of who an owner is.
A pin holds what is resident when it is made, as a lease does: it computes nothing.
"""

from __future__ import annotations

import builtins
import heapq
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, TypeVar

from radixkv import pin_audit
from radixkv.identity.identity import CacheIdentity
from radixkv.lease import Lease
from radixkv.nodes import Node
from radixkv.pin import BlockCounts, ExpiredPins, Held, Pin
from radixkv.prefixes import Prefixes
from radixkv.tokens import TOKEN_BYTES, encode

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache


K = TypeVar("K")


class Pins:
    """The pins of one cache. For the thread of the cache.

    A block stays for as long as a pin of any owner holds it. An owner's budget counts each block
    once; where it does not suffice, a pin gets the beginning of what was asked for, and says so. A
    grant depends on the owner's own pins and on what of his own is resident, never on other owners:
    whoever sets budgets sees to it that they leave room to work in.

    A pin with a TTL expires when it was not used for so long. Use is an ``acquire`` of the same
    identity that finds all that it holds. Whatever has expired is let go by ``acquire`` and by all
    that is here, so nobody has to call ``expire``.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.dropped = 0
        """Pins that resets have taken, ever."""
        self.on_expired: Callable[[Pin], None] | None = None
        """Told of each pin that was let go because nobody used it for its time."""
        self._cache = cache
        self._budgets: dict[str, int] = {}
        self._held: dict[str, Held] = {}
        self._of_owner: dict[str, dict[str, Held]] = {}
        self.prefixes: dict[CacheIdentity, Prefixes[Held]] = {}  # of identities that have any
        self._on_tail: dict[Node, dict[str, Held]] = {}
        self._blocks = BlockCounts()
        self._blocks_of: dict[str, BlockCounts] = {}
        self._queue: list[tuple[float, str]] = []  # of expiries; what it says is never too late
        self._expired = ExpiredPins()
        self._granting = False

    def __len__(self) -> int:
        return len(self._held)

    # -- pinning -----------------------------------------------------------------------------------

    def pin(
        self,
        identity: CacheIdentity,
        tokens: bytes,
        *,
        owner: str,
        ttl_s: float | None = None,
        name: str | None = None,
    ) -> Pin:
        """Keep what is resident of ``tokens``, as far as the budget goes; say how much that is.

        The same again (owner, name, identity and tokens) is the same pin: it tries to get what it
        is short of, and lasts as long as the longer-lived of the two. ValueError for a ``ttl_s``
        that is not above 0. O(blocks held and pins of the owner).
        """
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s is {ttl_s!r}; wanted more than 0 seconds, or None")
        if type(tokens) is not bytes:
            tokens = encode(tokens)
        now = self.clock()
        self.expire(now)
        held = self._same(owner, name, identity, tokens)
        if held is not None:
            if held.short:
                self._grant(held)
            longer = ttl_s is None or (held.ttl_s is not None and held.ttl_s < ttl_s)
            self._expect(held, ttl_s if longer else held.ttl_s, now)
            return held.shown()
        held = Held(owner, name, identity, tokens, now)
        self._grant(held)
        if held.lease is not None:
            self._held[held.id] = held
            self._of_owner.setdefault(owner, {})[held.id] = held
        self._expect(held, ttl_s, now)
        return held.shown()

    def _same(
        self, owner: str, name: str | None, identity: CacheIdentity, tokens: bytes
    ) -> Held | None:
        for held in self._of_owner.get(owner, {}).values():
            if held.name == name and held.tokens == tokens and held.identity == identity:
                return held
        return None

    def _grant(self, held: Held) -> None:
        """Let ``held`` have all that is resident and in the budget, and never less than it has."""
        before, lease = held.lease, self._lease(held, held.tokens)
        if lease.cached_tokens * TOKEN_BYTES < len(held.prefix):
            lease.release()  # what it has is not to be found any more
            return
        mine = self._blocks_of.setdefault(held.owner, BlockCounts())
        had = -(-len(held.prefix) // self._cache.tree.stride)
        self._uncount(held)
        wanted = lease.references()
        # A block in the place of a tail is no more than there was, though others are on the tail.
        kept = sum(1 for block in wanted[:had] if block not in mine)
        new = [i for i, block in enumerate(wanted) if i >= had and block not in mine]
        left = max(0, self.budget(held.owner)[0] - len(mine) - kept)
        held.short = None
        if len(new) > left:
            held.short = "budget"
            lease.release()
            lease = self._lease(held, held.tokens[: new[left] * self._cache.tree.stride])
        elif lease.cached_tokens < len(held.tokens) // TOKEN_BYTES:
            held.short = "not_resident"
        if before is not None:
            before.release()
        held.prefix = held.tokens[: lease.cached_tokens * TOKEN_BYTES]
        held.lease = lease
        if not held.prefix:
            lease.release()
            held.lease = None
        self._count(held)
        if not mine:
            del self._blocks_of[held.owner]

    def _lease(self, held: Held, tokens: bytes) -> Lease:
        """Hold what is resident of ``tokens``; it counts neither as a query nor, later, as use."""
        cache, size = self._cache, len(tokens) // TOKEN_BYTES
        self._granting = True
        try:
            lease = cache.acquire(held.identity, tokens, max_cached=size, batch=True)
        finally:
            self._granting = False
        account = cache.accounts.of(held.identity.namespace.tenant)
        cache._count(account, -1, lease._counted, lease.cached_tokens)
        return lease

    def _count(self, held: Held) -> None:
        if held.lease is None:
            return
        assert held.lease._node is not None
        root = held.lease._node.at(held.lease._depth).root
        held.account, held.public = root.account, root.start
        blocks = held.blocks()
        self._blocks_of[held.owner].add(blocks)
        self.prefixes.setdefault(held.identity, Prefixes()).put(held.prefix, held.id, held)
        held.account.pinned += self._blocks.add(blocks[held.public :])
        if held.public:
            self._cache.accounts.of(None).pinned += self._blocks.add(blocks[: held.public])
        tail = held.tail(self._cache.tree.stride)
        if tail is not None:
            self._on_tail.setdefault(tail, {})[held.id] = held
            if self._cache.tree.orphans is None:
                self._cache.tree.orphans = []

    def _uncount(self, held: Held) -> None:
        if held.lease is None:
            return
        assert held.account is not None
        blocks = held.blocks()
        self._blocks_of[held.owner].take(blocks)
        self.prefixes[held.identity].drop(held.prefix, held.id)
        if not self.prefixes[held.identity]:
            del self.prefixes[held.identity]
        held.account.pinned -= self._blocks.take(blocks[held.public :])
        if held.public:
            self._cache.accounts.of(None).pinned -= self._blocks.take(blocks[: held.public])
        tail = held.tail(self._cache.tree.stride)
        if tail is not None:
            _remove(self._on_tail, tail, held)
            if not self._on_tail:
                self._cache.tree.orphans = None

    # -- time --------------------------------------------------------------------------------------

    def refresh(self, pin_id: str, ttl_s: float | None = None) -> Pin | None:
        """Let a pin begin its time anew, ``ttl_s`` if given; None if there is no such pin."""
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s is {ttl_s!r}; wanted more than 0 seconds, or None")
        now = self.clock()
        self.expire(now)
        held = self._held.get(pin_id)
        if held is None:
            return None
        self._expect(held, held.ttl_s if ttl_s is None else ttl_s, now)
        return held.shown()

    def note_use(self, identity: CacheIdentity, tokens: bytes, cached_tokens: int) -> None:
        """Note that so much of ``tokens`` was found. O(log pins) for each that it begins with."""
        if self._granting:
            return
        now = self.clock()
        self.expire(now)
        mine = self.prefixes.get(identity)
        if mine is not None:  # one token more than was found: a prompt's last is left to compute
            for held in mine.beginning(tokens[: TOKEN_BYTES * (cached_tokens + 1)]):
                if held.ttl_s is not None:
                    held.expires_at = now + held.ttl_s

    def expire(self, now: float | None = None) -> list[Pin]:
        """Let go, and return, what was not used for its time. O(what expires)."""
        if now is None:
            now = self.clock()
        if self._cache.tree.orphans:
            self._follow_tails()
        gone = []
        while self._queue and self._queue[0][0] <= now:
            due, pin_id = heapq.heappop(self._queue)
            held = self._held.get(pin_id)
            if held is None or held.due != due:
                continue
            held.due = None
            if held.expires_at is not None and held.expires_at <= now:
                gone.append(held.shown())
                self._expired.note(held.identity, held.prefix, self._cache.tree.clock)
                self._let_go(held)
                if self.on_expired is not None:
                    self.on_expired(gone[-1])
            else:
                self._enqueue(held)
        return gone

    def _expect(self, held: Held, ttl_s: float | None, now: float) -> None:
        """Let the time of ``held`` begin now."""
        held.ttl_s = ttl_s
        held.expires_at = None if ttl_s is None else now + ttl_s
        self._enqueue(held)

    def _enqueue(self, held: Held) -> None:
        at = held.expires_at
        if at is not None and held.id in self._held and (held.due is None or at < held.due):
            held.due = at
            heapq.heappush(self._queue, (at, held.id))
            if len(self._queue) > 2 * len(self._held) + 64:  # mostly of pins that were let go
                self._queue = [(x.due, x.id) for x in self._held.values() if x.due is not None]
                heapq.heapify(self._queue)

    def _follow_tails(self) -> None:
        """Hold whole blocks where they have replaced the tails that were held."""
        orphans, self._cache.tree.orphans = self._cache.tree.orphans or [], []
        for tail in orphans:
            for held in [*self._on_tail.get(tail, {}).values()]:
                self._grant(held)

    def expired_to(self, identity: CacheIdentity, tokens: bytes, when: int) -> int:
        """Return how many of ``tokens`` a pin held that ran out before ``when`` (tree's clock)."""
        return self._expired.longest(identity, tokens, when)

    # -- letting go --------------------------------------------------------------------------------

    def unpin(self, pin_id: str, *, owner: str | None = None) -> bool:
        """Let a pin go, if it is ``owner``'s or that is None; return whether there was one."""
        held = self._held.get(pin_id)
        if held is None or (owner is not None and held.owner != owner):
            return False
        self._let_go(held)
        return True

    def unpin_owner(self, owner: str) -> int:
        """Let all pins of ``owner`` go; return how many."""
        mine = [*self._of_owner.get(owner, {}).values()]
        for held in mine:
            self._let_go(held)
        return len(mine)

    def drop_all(self) -> list[Pin]:
        """Let everything go, because it is about to be forgotten; return what it was."""
        gone = self.list()
        for pin in gone:
            self._let_go(self._held[pin.id])
        self.dropped += len(gone)
        return gone

    def _let_go(self, held: Held) -> None:
        assert held.lease is not None
        self._uncount(held)
        held.lease.release()
        held.lease = None
        del self._held[held.id]
        _remove(self._of_owner, held.owner, held)
        if not self._blocks_of[held.owner]:
            del self._blocks_of[held.owner]

    # -- what there is -----------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that any pin holds. O(1)."""
        return len(self._blocks)

    def used_blocks(self, owner: str) -> int:
        """Return how many blocks the pins of ``owner`` hold, each counted once. O(1)."""
        return len(self._blocks_of.get(owner, ()))

    def budget(self, owner: str) -> tuple[int, int]:
        """Return how many blocks ``owner`` may pin, and how many it has. O(1).

        It may pin a quarter of the pool if nobody has said otherwise.
        """
        limit = self._budgets.get(owner, self._cache.num_blocks // 4)
        return limit, self.used_blocks(owner)

    def set_budget(self, owner: str, blocks: int | None) -> None:
        """Set how many blocks ``owner`` may pin from now on; None: what is usual. Takes nothing."""
        if blocks is None:
            self._budgets.pop(owner, None)
        elif blocks < 0:
            raise ValueError(f"a budget of {blocks} blocks; wanted 0 or more")
        else:
            self._budgets[owner] = blocks

    def list(self, owner: str | None = None) -> builtins.list[Pin]:
        """Return the pins of ``owner``, or all, the oldest first."""
        self.expire()
        mine = self._held if owner is None else self._of_owner.get(owner, {})
        return [held.shown() for held in mine.values()]

    def check(self) -> builtins.list[str]:
        """Return each broken invariant in words. O(blocks pinned)."""
        return pin_audit.check(self)


def _remove(index: MutableMapping[K, dict[str, Held]], key: K, held: Held) -> None:
    """Take ``held`` out of its group, and the group out of ``index`` with the last of it."""
    del index[key][held.id]
    if not index[key]:
        del index[key]
