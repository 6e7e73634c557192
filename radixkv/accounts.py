"""What each tenant has in the cache, has asked of it, and may count on.

Knows tenants' names and numbers of blocks; nothing of tokens, or of how a block is given up. A
tenant is what authentication says it is; ``None`` stands for what is public, and for whoever uses
the cache without tenants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.errors import InvalidConfig
from radixkv.eviction import LruLeaves
from radixkv.nodes import Root
from radixkv.victims import Victims

if TYPE_CHECKING:
    from radixkv.public import PublicPrefix
    from radixkv.tree import RadixTree


@dataclass(frozen=True, slots=True)
class AccountStats:
    """A snapshot of one account. Blocks are those of the tree; counters never fall."""

    tenant: str | None
    blocks: int
    """Resident, in use or not."""
    evictable: int
    """Resident and in nobody's use."""
    quota: int | None
    """Blocks beyond which it is the first to give some up; None: no such number."""
    floor: int
    """Blocks below which it falls by its own work only."""
    pinned_blocks: int
    """Resident because they are pinned."""
    queries: int
    queried_tokens: int
    """Tokens of its sequences, resumed ones left out: the denominator of the hit rate."""
    hit_tokens: int
    """Those found resident, be it in its own part or in the public one."""
    published_blocks: int
    """Blocks that entered its part."""
    evicted_suffered: int
    """Blocks that it gave up, whoever needed the room."""
    evicted_caused: int
    """Blocks that were given up, whosever they were, because it needed the room."""


class Terms:
    """On whose account and how a sequence works: what leases and tables carry along."""

    __slots__ = ("account", "batch", "border", "plain")

    def __init__(
        self, account: Account, batch: bool = False, border: PublicPrefix | None = None
    ) -> None:
        self.account = account
        self.batch = batch
        self.border = border
        self.plain = not batch and border is None


class Account:
    """One tenant's part of the tree; its roots point here. Plain numbers, kept by the tree."""

    __slots__ = (
        "aside",
        "blocks",
        "bounded",
        "caused",
        "evictable",
        "excess",
        "floor",
        "hit",
        "index",
        "leaves",
        "pinned",
        "protected",
        "published",
        "queried",
        "queries",
        "quota",
        "roots",
        "suffered",
        "tenant",
        "terms",
    )

    def __init__(self, tenant: str | None, index: int) -> None:
        self.tenant = tenant
        self.index = index
        self.terms = Terms(self)  # of interactive work without a public prefix
        self.leaves = LruLeaves()
        self.roots: set[Root] = set()
        self.blocks = self.evictable = 0
        self.quota: int | None = None
        self.floor = 0
        self.bounded = False  # has a quota or a floor, so that each change is to be noted
        self.protected = 0  # evictable blocks that its floor keeps from others
        self.excess = 0  # its place among those over their quotas, 0 for none; see Victims
        self.aside = False  # out of the common line, since it is at its floor
        self.pinned = self.queries = self.queried = self.hit = 0
        self.published = self.suffered = self.caused = 0

    def stats(self) -> AccountStats:
        """Return the numbers as they are now."""
        return AccountStats(
            tenant=self.tenant,
            blocks=self.blocks,
            evictable=self.evictable,
            quota=self.quota,
            floor=self.floor,
            pinned_blocks=self.pinned,
            queries=self.queries,
            queried_tokens=self.queried,
            hit_tokens=self.hit,
            published_blocks=self.published,
            evicted_suffered=self.suffered,
            evicted_caused=self.caused,
        )

    def clear_counters(self) -> None:
        """Let the counters begin again from 0."""
        self.queries = self.queried = self.hit = 0
        self.published = self.suffered = self.caused = 0


class Accounts:
    """Every tenant that was ever heard of, and what the shares promise.

    A quota is soft: room that nobody else wants may be used beyond it. A floor binds: while an
    account has no more blocks than that, only its own work takes any of them. Neither reserves what
    is not there yet: a floor keeps what was cached, and makes no room by itself.

    ``protected`` is how many evictable blocks floors keep from everybody but their owners, so what
    one may have is O(1) to say.

    While there is a single account without a share, nobody keeps its numbers: they are those of
    the whole. ``tree.many`` says that this is over, and ``settle`` writes them down.
    """

    __slots__ = (
        "by_tenant",
        "capacity",
        "hit",
        "protected",
        "queried",
        "queries",
        "terms",
        "tree",
        "victims",
    )

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.capacity = tree.pool.capacity
        self.queries = self.queried = self.hit = 0  # of all, resumed sequences left out
        self.terms: dict[str | None, Terms] = {}
        self.victims = Victims()
        self.protected = 0
        self.by_tenant: dict[str | None, Account] = {}

    def of(self, tenant: str | None) -> Account:
        """Return the account of ``tenant``, opened if need be."""
        account = self.by_tenant.get(tenant)
        if account is None:
            if self.by_tenant:
                self._part()
            account = self.by_tenant[tenant] = Account(tenant, len(self.by_tenant))
            self.terms[tenant] = account.terms
            self.victims.admit(account)
        return account

    def settle(self) -> None:
        """Bring the numbers of a single account up to date."""
        tree = self.tree
        if not tree.many:
            for account in self.by_tenant.values():
                account.blocks, account.evictable = tree.num_blocks, tree.evictable
                account.published = tree.num_published
                account.suffered = account.caused = tree.num_evicted
                account.queries, account.queried = self.queries, self.queried
                account.hit = self.hit

    def _part(self) -> None:
        """From now on keep the numbers of each account."""
        self.settle()
        self.tree.many = True

    def __iter__(self) -> Iterator[Account]:
        self.settle()
        return iter(self.by_tenant.values())

    def __len__(self) -> int:
        return len(self.by_tenant)

    def __contains__(self, tenant: str | None) -> bool:
        return tenant in self.by_tenant

    def set_shares(self, shares: Mapping[str | None, tuple[int | None, int]]) -> None:
        """Set (quota, floor) of each tenant named, in blocks; (None, 0) takes them back.

        Raises InvalidConfig, and changes nothing, if all floors together exceed the pool or a quota
        lies below its floor.
        """
        floors = sum(account.floor for account in self if account.tenant not in shares)
        for tenant, (quota, floor) in shares.items():
            if floor < 0 or (quota is not None and quota < floor):
                raise InvalidConfig(
                    f"the share of tenant {tenant!r} is quota {quota}, floor {floor}; "
                    "wanted 0 <= floor <= quota blocks"
                )
            if floors + floor > self.capacity:
                raise InvalidConfig(
                    f"a floor of {floor} blocks for tenant {tenant!r} and {floors} for the others "
                    f"exceed the {self.capacity} blocks of the cache"
                )
            floors += floor
        for tenant, (quota, floor) in shares.items():
            account = self.of(tenant)
            self._part()
            account.quota, account.floor = quota, floor
            account.bounded = quota is not None or floor > 0
            self.note(account)

    def count_evictable(self, account: Account, n: int) -> None:
        """Note that ``n`` more blocks of ``account`` are evictable, or -n fewer."""
        account.evictable += n
        if account.bounded:
            self.note(account)

    def count_blocks(self, account: Account, n: int, evictable: int = 0) -> None:
        """Note that ``n`` more blocks of ``account`` are resident, and so many more evictable.

        Where each hold, publication and eviction passes, the tree does the same by itself.
        """
        account.blocks += n
        account.evictable += evictable
        if account.bounded:
            self.note(account)

    def note(self, account: Account) -> None:
        """Take notice that the blocks of an account with a share have changed in number. O(1)."""
        evictable, above = account.evictable, max(0, account.blocks - account.floor)
        protected = evictable - above if evictable > above else 0
        self.protected += protected - account.protected
        account.protected = protected
        self.victims.note(account, above)

    def evictable_by(self, account: Account, evictable: int) -> int:
        """Return how many of all ``evictable`` blocks the owner of ``account`` may have. O(1)."""
        return evictable - self.protected + account.protected

    def ceiling(self, tenant: str | None) -> int:
        """Return the blocks that ``tenant`` can always come to have while nobody else runs.

        What lies beyond may be kept by others' floors for ever. O(accounts).
        """
        return self.capacity - sum(a.floor for a in self if a.tenant != tenant)

    def clear_counters(self) -> None:
        """Let all counters begin again from 0."""
        self.queries = self.queried = self.hit = 0
        for account in self:
            account.clear_counters()

    def clear(self) -> None:
        """Note that the tree is empty; shares and counters stay."""
        self.victims.clear()
        for account in self:
            account.leaves = LruLeaves()
            account.roots.clear()
            account.blocks = account.evictable = 0
            if account.bounded:
                self.note(account)
        self.victims.readmit(self)

    def check(self, blocks: dict[Account, int], evictable: dict[Account, int]) -> list[str]:
        """Return each broken invariant in words, given what a walk of the tree has found."""
        wrong = []
        for account in {*self, *blocks}:
            name = f"the account of {account.tenant!r}"
            found = blocks.get(account, 0), evictable.get(account, 0)
            if self.by_tenant.get(account.tenant) is not account:
                wrong.append(f"{name} is not in the book")
            if (account.blocks, account.evictable) != found:
                wrong.append(
                    f"{name} has {account.blocks} blocks, {account.evictable} evictable, "
                    f"by count and {found[0]}, {found[1]} by walk"
                )
            keeps = min(account.evictable, max(0, account.blocks - account.floor))
            if account.protected != account.evictable - keeps:
                wrong.append(f"{name} keeps {account.protected} blocks from others, not {keeps}")
        if self.protected != sum(account.protected for account in self):
            wrong.append(f"{self.protected} blocks are protected by count")
        return [*wrong, *self.victims.check(self)]
