"""The prefix cache: what of a sequence is resident, held for as long as it is used.

Knows identities, token bytes and block ids; nothing of tensors, models or requests. Whoever uses
it owns ``num_blocks`` blocks of device memory, computes what is missing and says when it is done.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping

from radixkv import audit
from radixkv.accounts import Account, AccountStats, Terms
from radixkv.blocks import NO_BLOCKS, BlockPool
from radixkv.copies import PendingCopies
from radixkv.dump import Dump, dump
from radixkv.errors import CacheBusy
from radixkv.explain import Explanation, explain
from radixkv.ghosts import Ghosts
from radixkv.holder import Holder
from radixkv.identity.identity import CacheIdentity
from radixkv.lease import Lease as Lease
from radixkv.matching import NOTHING, Match
from radixkv.nodes import Node
from radixkv.pins import Pins
from radixkv.public import PublicPrefix, PublicPrefixes, match_beyond
from radixkv.residency import Residency
from radixkv.shrinking import prune
from radixkv.stats import CacheStats
from radixkv.table import BlockTable
from radixkv.tokens import encode
from radixkv.tree import RadixTree


class PrefixCache:
    """A pool of blocks and the tree of what they hold. For one thread.

    A sequence's life: ``acquire`` what is resident, ``open`` a table, ``reserve`` room, compute,
    ``commit``, ``publish``, and ``release``. Blocks enter the tree only at ``publish``, when their
    KV exists; so whatever ends early just releases, and nobody ever reads what was not written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        enabled: bool = True,
        force_miss: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``enabled=False`` shares nothing; ``force_miss=True`` keeps all in order but finds none.

        The second is a control for measurements: every step is taken, no KV is reused. ``clock``
        tells seconds and never falls: for pins, and for how long blocks live.
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; wanted at least 1")
        self.block_size = block_size
        self.enabled = enabled
        self.force_miss = force_miss
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.accounts = self.tree.accounts
        self.pins = Pins(self, clock)
        self.ghosts = Ghosts(self.tree)
        self.residency = Residency(num_blocks, self.tree.stride, clock)
        self._public = PublicPrefixes()
        self._live: set[Holder] = set()
        self._copies = PendingCopies()
        self._partial = 0
        self._resumed_queried = self._resumed_hit = 0
        self._cow_copies = self._resets = 0
        self.tree.on_evict = self.ghosts.note

    def tick(self) -> None:
        """Note the time, for how long blocks live; to be called once a step. O(1)."""
        self.residency.tick(self.tree.clock)

    def _look(self, node: Node | None, depth: int) -> None:
        """Look at what an acquire has found, at what is published next, and at all evictions."""
        self.tick()
        self.residency.found(node, depth)
        self.tree.look_at_published = self.residency.published
        self.tree.look_at_evicted = self.residency.evicting

    # -- sequences ---------------------------------------------------------------------------------

    def acquire(
        self,
        identity: CacheIdentity,
        tokens: bytes,
        *,
        max_cached: int | None = None,
        resumed: bool = False,
        batch: bool = False,
    ) -> Lease:
        """Find the longest resident prefix of ``tokens`` and hold it, before anything else happens.

        At most ``max_cached`` tokens; by default all but the last, which is left to compute because
        its logits are wanted. ``resumed``: the sequence was counted before and was preempted.
        ``batch``: nobody waits for it, so what it uses is evicted before all that others have used.
        """
        if type(tokens) is not bytes:
            tokens = encode(tokens)
        (runs, _, source, num_valid, node), cached, border = self._match(
            identity, tokens, max_cached
        )
        ids = array("i")
        for run in runs:
            ids += run
        if source is not None:
            ids.append(source)
        residency = self.residency
        residency.until_find -= 1
        if not residency.until_find:
            self._look(node, len(ids))
        if node is not None:
            self.tree.hold(node, len(ids))
        tenant = identity.namespace.tenant
        terms = self.accounts.terms.get(tenant) or self.accounts.of(tenant).terms
        if batch or border is not None:
            terms = Terms(terms.account, batch, border)
        lease = Lease(self, identity, ids, node, len(ids), cached, terms)
        lease._counted = counted = (len(tokens) // 4, num_valid, resumed)
        self._count(terms.account, 1, counted, cached)
        if self.pins.prefixes:
            self.pins.note_use(identity, tokens, cached)
        return lease

    def lookup(
        self, identity: CacheIdentity, tokens: bytes, *, max_cached: int | None = None
    ) -> int:
        """Return the tokens that ``acquire`` would find. Holds, touches and counts nothing."""
        if type(tokens) is not bytes:
            tokens = encode(tokens)
        return self._match(identity, tokens, max_cached)[1]

    def explain(
        self,
        identity: CacheIdentity,
        tokens: bytes,
        *,
        max_cached: int | None = None,
        context: int = 64,
        every_salt: bool = False,
    ) -> Explanation:
        """Say what ``acquire`` would find, and why not the rest; see ``radixkv.explain``."""
        return explain(
            self,
            identity,
            tokens,
            max_cached=max_cached,
            context=context,
            every_salt=every_salt,
        )

    def open(self, lease: Lease) -> BlockTable:
        """Return a sequence's table, which takes over what ``lease`` holds, and end the lease."""
        if lease.released:
            raise ValueError("this lease was released or opened before")
        table = BlockTable(lease, lease._ids, lease._node, lease._depth, lease.cached_tokens)
        lease.released = True
        lease._ids, lease._node, lease._depth = NO_BLOCKS, None, 0
        self._live.discard(lease)
        return table

    def _count(self, account: Account, sign: int, counted: tuple[int, int, bool], hit: int) -> None:
        num_tokens, partial, resumed = counted
        if resumed:
            self._resumed_queried += sign * num_tokens
            self._resumed_hit += sign * hit
        else:
            whole = self.accounts
            whole.queries += sign
            whole.queried += sign * num_tokens
            whole.hit += sign * hit
            self._partial += sign * partial
            if self.tree.many:
                account.queries += sign
                account.queried += sign * num_tokens
                account.hit += sign * hit

    def _match(
        self, identity: CacheIdentity, tokens: bytes, max_cached: int | None
    ) -> tuple[Match, int, PublicPrefix | None]:
        border = self._public.of(identity, tokens) if self._public.count else None
        limit = len(tokens) - 4 if max_cached is None else min(4 * max_cached, len(tokens))
        if limit <= 0 or self.force_miss:
            return NOTHING, 0, border
        match = self.tree.match(identity, tokens, limit)
        if match is NOTHING:
            self.tree.expect(identity)
        if border is not None:
            match, border = match_beyond(self.tree, border, identity, tokens, limit, match)
        return match, match[1] * self.block_size + match[3], border

    # -- what is public ----------------------------------------------------------------------------

    def declare_public(self, identity: CacheIdentity, tokens: bytes) -> PublicPrefix:
        """Let every tenant share the KV of ``tokens`` where a sequence begins with all of them.

        ``identity`` says for which model and is in the public namespace (else ValueError). What
        follows stays private. Publishing a sequence of exactly these tokens makes all of it
        resident at once. Declaring the same again changes nothing.
        """
        self.tree.expect(identity)
        self.tree.version += 1
        return self._public.declare(identity, tokens)

    def withdraw_public(self, prefix: PublicPrefix) -> None:
        """Take ``prefix`` back: nobody who comes from now on finds it, or what went on from it.

        Who uses it keeps it, and shares no more. What was private behind it is evicted, at the
        latest when it is let go; the prefix itself stays the public identity's own. Idempotent.
        """
        self._public.withdraw(prefix)
        for mount in [*prefix.mounts.values()]:
            self.ghosts.note_lost(mount.identity, prefix.tokens[: mount.start * self.tree.stride])
            prune(self.tree, mount)
        self.tree.version += 1

    def public_prefixes(self) -> tuple[PublicPrefix, ...]:
        """Return what is declared public now."""
        return self._public.all()

    # -- the whole ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that are free or evictable; floors may keep some from some tenants. O(1)."""
        return self.pool.free + self.tree.evictable

    def available_to(self, tenant: str | None) -> int:
        """Blocks that ``tenant`` could take now without breaking another's floor. O(1)."""
        evictable = self.accounts.evictable_by(self.accounts.of(tenant), self.tree.evictable)
        return self.pool.free + evictable

    def set_share(self, tenant: str | None, *, quota: int | None = None, floor: int = 0) -> None:
        """Set what ``tenant`` (None: the public part) may keep, in blocks; see Accounts.

        Raises InvalidConfig if the floors together exceed the pool or the quota is below the floor.
        """
        self.accounts.set_shares({tenant: (quota, floor)})

    def set_shares(self, shares: Mapping[str | None, tuple[int | None, int]]) -> None:
        """The same of several tenants, (quota, floor) each: all at once, or none."""
        self.accounts.set_shares(shares)

    def account(self, tenant: str | None) -> AccountStats:
        """Return what ``tenant`` has, has asked for and has lost. O(1)."""
        account = self.accounts.of(tenant)
        self.accounts.settle()
        return account.stats()

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.pool.capacity

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.free

    @property
    def cached_blocks(self) -> int:
        """Blocks in the tree, in use or not."""
        return self.tree.num_blocks

    @property
    def evictable_blocks(self) -> int:
        """Blocks that only the tree holds."""
        return self.tree.evictable

    @property
    def version(self) -> int:
        """Changes whenever the answer of a look-up may have changed."""
        return self.tree.version

    def reset(self) -> int:
        """Forget everything, pins too; return how many blocks that freed.

        Raises CacheBusy while sequences or leases are in use, and then forgets nothing.
        """
        leases = len(self._live) - len(self.pins)
        if leases:
            tables = sum(isinstance(x, BlockTable) for x in self._live)
            raise CacheBusy(
                f"the cache is in use by {tables} sequences and {leases - tables} leases; retry "
                "when they have ended"
            )
        self.pins.drop_all()
        roots = [root for account in self.accounts for root in account.roots]
        self.ghosts.note_all(roots)
        self.residency.forget()
        self._resets += 1
        return self.tree.clear()

    def clear_counters(self) -> None:
        """Let the counters begin again from 0, and forget what went; what is resident stays."""
        tree = self.tree
        self._partial = 0
        self._resumed_queried = self._resumed_hit = 0
        self._cow_copies = self._resets = 0
        tree.num_published = tree.num_deduplicated = tree.num_evicted = 0
        self.residency.clear()
        self.ghosts.clear()
        self.accounts.clear_counters()

    def stats(self) -> CacheStats:
        """Return counters and gauges as they are now. O(1)."""
        pool, tree = self.pool, self.tree
        return CacheStats(
            queries=self.accounts.queries,
            queried_tokens=self.accounts.queried,
            hit_tokens=self.accounts.hit,
            partial_hit_tokens=self._partial,
            resumed_queried_tokens=self._resumed_queried,
            resumed_hit_tokens=self._resumed_hit,
            published_blocks=tree.num_published,
            deduplicated_blocks=tree.num_deduplicated,
            evicted_blocks=tree.num_evicted,
            cow_copies=self._cow_copies,
            resets=self._resets,
            num_blocks=pool.capacity,
            free_blocks=pool.free,
            referenced_blocks=pool.referenced,
            cached_blocks=tree.num_blocks,
            cached_tokens=tree.num_blocks * self.block_size - tree.num_unfilled,
            evictable_blocks=tree.evictable,
            nodes=tree.num_nodes,
            identities=len(tree.roots) + tree.num_mounts,
        )

    def check(self) -> list[str]:
        """Return each broken invariant in words. O(blocks): for tests and idle moments."""
        counted = {
            "queries": self.accounts.queries,
            "queried": self.accounts.queried,
            "hit": self.accounts.hit,
            "published": self.tree.num_published,
            "suffered": self.tree.num_evicted,
            "caused": self.tree.num_evicted,
        }
        return [*audit.check(self.tree, self._live, counted), *self.pins.check()]

    def dump(
        self,
        tenants: Collection[str | None] | None = None,
        *,
        depth: int = 8,
        limit: int = 1000,
        token_ids: int = 0,
    ) -> Dump:
        """Return the tree of ``tenants``, or of all, for drawing; see ``radixkv.dump``."""
        return dump(self, tenants, depth=depth, limit=limit, token_ids=token_ids)
