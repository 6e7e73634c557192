"""The dull model of tenants: who has what, who may keep what, and whose block is the next to go.

Knows paths, whose they are and when each was last let go; it sorts everything anew each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache import PrefixCache

Path = tuple[Any, ...]
"""A place, which says whose tree it is, and the tokens up to the end of one of its blocks."""
Tenant = str | None
Time = tuple[int, int]
"""0 for batch and 1 for interactive work, then when."""
NEVER: Time = (-1, 0)


@dataclass
class Border:
    """A declared prefix and under which public place it is shared; equal only to itself."""

    public: int
    tokens: tuple[int, ...]
    prefix: Any
    withdrawn: bool = False

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass
class Shares:
    """What was promised to each tenant, and what each has done and suffered so far."""

    size: int
    tenant_of: dict[Hashable, Tenant] = field(default_factory=dict)  # by identity's number
    quota: dict[Tenant, int | None] = field(default_factory=dict)
    floor: Counter[Tenant] = field(default_factory=Counter)
    counts: dict[str, Counter[Tenant]] = field(default_factory=dict)

    def count(self, name: str, tenant: Tenant, n: int) -> None:
        self.counts.setdefault(name, Counter())[tenant] += n

    def owner(self, path: Path) -> Tenant:
        """Whose account the block at the end of ``path`` is in."""
        place = path[0]
        return self.tenant_of[place[0] if isinstance(place, tuple) else place]

    def before(self, path: Path) -> Path:
        """The path that ends one block before ``path`` does."""
        return path[: 1 + (len(path) - 2) // self.size * self.size]

    def replay(
        self,
        resident: Mapping[Path, int],
        held: set[int],
        gone: Iterable[Path],
        taker: Tenant,
        times: Mapping[Path, Time],
    ) -> None:
        """Give up the blocks of ``gone`` one by one, each when it may be the next to go."""
        left, waiting = dict(resident), set(gone)
        self.count("evicted_caused", taker, len(waiting))
        while waiting:
            allowed = self.next(left, held, taker, times)
            now = allowed & waiting
            assert now, f"{waiting} went, and of {allowed} one had to"
            path = min(now, key=repr)
            waiting.remove(path)
            del left[path]
            self.count("evicted_suffered", self.owner(path), 1)

    def next(
        self, left: Mapping[Path, int], held: set[int], taker: Tenant, times: Mapping[Path, Time]
    ) -> set[Path]:
        """Which blocks may be given up next: several only if they are of one age or standing."""
        inner = {self.before(path) for path in left}
        leaves: dict[Tenant, list[Path]] = {}
        for path, block in left.items():
            if block not in held and path not in inner:
                leaves.setdefault(self.owner(path), []).append(path)
        blocks = Counter(map(self.owner, left))
        over = {
            tenant: blocks[tenant] - quota
            for tenant, quota in self.quota.items()
            if quota is not None and blocks[tenant] > quota and tenant in leaves
        }
        above = [tenant for tenant in leaves if blocks[tenant] > self.floor[tenant]]
        if over:
            most = max(over.values())
            groups = [leaves[tenant] for tenant, excess in over.items() if excess == most]
        elif above:
            groups = [[path for tenant in above for path in leaves[tenant]]]
        else:
            groups = [leaves[taker]]
        out = set()
        for group in groups:
            oldest = min(times.get(path, NEVER) for path in group)
            out |= {path for path in group if times.get(path, NEVER) == oldest}
        return out

    def available(self, tenant: Tenant, resident: Mapping[Path, int], held: set[int]) -> int:
        """How many resident blocks ``tenant`` could have, without breaking another's floor."""
        blocks = Counter(map(self.owner, resident))
        idle = Counter(self.owner(path) for path, block in resident.items() if block not in held)
        return sum(
            n if t == tenant else min(n, max(0, blocks[t] - self.floor[t])) for t, n in idle.items()
        )

    def prove(self, cache: PrefixCache, resident: Mapping[Path, int], held: set[int]) -> None:
        """Every account says what a count says, and all of them together what the cache says."""
        blocks = Counter(map(self.owner, resident))
        idle = Counter(self.owner(path) for path, block in resident.items() if block not in held)
        tenants = {*self.tenant_of.values()}
        for tenant in tenants:
            stats = cache.account(tenant)
            assert (stats.blocks, stats.evictable) == (blocks[tenant], idle[tenant])
            assert (stats.quota, stats.floor) == (self.quota.get(tenant), self.floor[tenant])
            for name, counts in self.counts.items():
                assert getattr(stats, name) == counts[tenant], (name, tenant)
            free = cache.free_blocks
            assert cache.available_to(tenant) - free == self.available(tenant, resident, held)
        whole = cache.stats()
        each = [cache.account(tenant) for tenant in tenants]
        assert sum(a.blocks for a in each) == whole.cached_blocks
        assert sum(a.evictable for a in each) == whole.evictable_blocks
        assert sum(a.queried_tokens for a in each) == whole.queried_tokens
        assert sum(a.hit_tokens for a in each) == whole.hit_tokens
        assert sum(a.published_blocks for a in each) == whole.published_blocks
        assert sum(a.evicted_suffered for a in each) == whole.evicted_blocks
        assert sum(a.evicted_caused for a in each) == whole.evicted_blocks
