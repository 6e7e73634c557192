"""A dull model beside a real cache: what users do, each time compared with what is true.

Every operation checks what it can by itself; ``prove`` checks the rest. What is true is worked out
in cache_truth.py, who has to give up what in cache_shares.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import pytest

from radixkv.blocks import BlockCopy
from radixkv.errors import CacheBusy, InvalidConfig, OutOfBlocks
from radixkv.lease import Lease
from radixkv.table import BlockTable
from radixkv.tokens import encode
from tests.cache_shares import Border, Path
from tests.cache_truth import GARBAGE, PLAIN, Truth, Who


@dataclass(eq=False)
class Sequence:
    """A table, the tokens it is to hold, where they begin to be private, and what was reserved."""

    who: int
    table: BlockTable
    tokens: list[int]
    border: Border | None
    reserved: int | None = None
    copies: list[BlockCopy] = field(default_factory=list)


@dataclass(eq=False)
class Waiting:
    """A lease and whose it is."""

    lease: Lease
    who: int
    tokens: list[int]
    border: Border | None


class World(Truth):
    """A cache, its device and its users; the methods are what users do."""

    def __init__(self, block_size: int, num_blocks: int, who: Many[Who] = PLAIN) -> None:
        super().__init__(block_size, num_blocks, who)
        self.leases: list[Waiting] = []
        self.sequences: list[Sequence] = []
        self.evicted = 0

    def pick(self, choice: int, reserved: bool | None = None) -> Sequence | None:
        """One of the sequences, or of those (not) waiting for the device."""
        fit = [
            s for s in self.sequences if reserved is None or (s.reserved is not None) == reserved
        ]
        return fit[choice % len(fit)] if fit else None

    def held(self) -> set[int]:
        users: list[Lease | BlockTable] = [s.table for s in self.sequences]
        users += [waiting.lease for waiting in self.leases]
        return {block for user in users for block in user.references()}

    def expect_evicted(self, before: dict[Path, int], held: set[int], who: int) -> None:
        """What is gone since ``who`` has reserved went in the right order, one after the other."""
        times = dict(self.times)
        gone = self.look()
        self.evicted += len(gone)
        assert self.cache.stats().evicted_blocks == self.evicted
        tenant = self.shares.tenant_of[who]
        for path in [path for path, block in gone.items() if block in held]:
            del gone[path]  # taken over, since nothing else was left
            assert self.cache.available_to(tenant) == 0
            self.shares.count("evicted_suffered", self.shares.owner(path), 1)
            self.shares.count("evicted_caused", tenant, 1)
        self.shares.replay(before, held, gone, tenant, times)

    def expect_swept(self, who: int | None, border: Border | None) -> None:
        """What nobody finds any more and nobody has is gone, and nothing else is."""
        gone, held = self.look(), self.held()
        self.evicted += len(gone)
        assert self.cache.stats().evicted_blocks == self.evicted
        for path, block in gone.items():
            assert border is not None and border.withdrawn and block not in held
            assert isinstance(path[0], tuple) and path[0][1] is border
            self.shares.count("evicted_suffered", self.shares.owner(path), 1)
            self.shares.count("evicted_caused", self.shares.tenant_of[border.public], 1)
        if border is not None and border.withdrawn:
            for path, block in self.resident.items():
                place = path[0]
                if isinstance(place, tuple) and place[1] is border and who in (None, place[0]):
                    assert block in held

    # -- what users do -------------------------------------------------------------------------

    def acquire(self, who: int, tokens: list[int], spare: int, batch: bool = False) -> None:
        limit = max(0, len(tokens) - spare)
        expected, border = self.find(who, tokens, limit)
        key = encode(tokens)
        assert self.cache.lookup(self.identities[who], key, max_cached=limit) == expected
        version, nodes = self.cache.version, self.cache.stats().nodes
        lease = self.cache.acquire(self.identities[who], key, max_cached=limit, batch=batch)
        assert lease.cached_tokens == expected, "not the longest common prefix"
        after = (self.cache.version, self.cache.stats().nodes)
        assert after == (version, nodes), "a match has changed the tree"
        self.count(who, 1, len(tokens), expected)
        self.leases.append(Waiting(lease, who, list(tokens), border))

    def count(self, who: int, queries: int, queried: int, hit: int) -> None:
        tenant = self.shares.tenant_of[who]
        self.shares.count("queries", tenant, queries)
        self.shares.count("queried_tokens", tenant, queried)
        self.shares.count("hit_tokens", tenant, hit)

    def open(self, choice: int) -> Sequence:
        w = self.leases.pop(choice % len(self.leases))
        table = self.cache.open(w.lease)
        w.lease.release()  # it has nothing left to release
        assert table.num_tokens == table.cached_tokens == w.lease.cached_tokens
        self.sequences.append(Sequence(w.who, table, w.tokens, w.border))
        return self.sequences[-1]

    def give_up(self, choice: int, cancel: bool = False) -> None:
        w = self.leases.pop(choice % len(self.leases))
        self.let_go(w.lease.references(), w.lease.batch)
        if cancel:
            self.count(w.who, -1, -len(w.tokens), -w.lease.cached_tokens)
            w.lease.cancel()
        w.lease.release()
        w.lease.cancel()
        self.expect_swept(w.who, w.border)

    def begin(
        self, who: int, tokens: list[int], stage: int, tail: bool, batch: bool = False
    ) -> None:
        """A request as most are: all at once, up to some stage."""
        self.acquire(who, tokens, 1, batch)
        s = self.open(len(self.leases) - 1)
        while stage > 0 and s.table.num_tokens < len(s.tokens):
            left = len(s.tokens) - s.table.num_tokens
            self.reserve(s, min(left, s.table.tokens_to_border or left), [])
            if stage == 1 or s.reserved is None:
                break
            self.compute(s)
            if stage > 2:
                self.publish(s, tail)
        if stage > 3:
            self.abort(s, wrote=True)

    def reserve(self, s: Sequence, n: int, more: list[int]) -> None:
        if len(s.tokens) < s.table.num_tokens + n:
            s.tokens += more
        n = min(n, len(s.tokens) - s.table.num_tokens)
        tenant = self.shares.tenant_of[s.who]
        needed, available = s.table.blocks_needed(n), self.cache.available_to(tenant)
        whole = self.cache.available
        before, version = s.table.references(), self.cache.version
        resident, held = self.resident, self.held()
        try:
            copies = s.table.reserve(n)
        except OutOfBlocks:
            assert needed > available
            assert s.table.references() == before and self.cache.version == version
            assert self.cache.available == whole
            return
        assert needed <= available
        assert whole - self.cache.available == needed
        s.reserved, s.copies = n, copies
        self.expect_evicted(resident, held, s.who)
        for copy in copies:
            assert copy.source in held and copy.target in s.table.blocks
            assert copy.num_valid == s.table.num_tokens % self.size

    def write(self, s: Sequence, valid: bool) -> None:
        """What the device does in a step: the copies, then the KV of the reserved positions."""
        for source, target, num_valid in s.copies:
            self.device[target][:num_valid] = self.device[source][:num_valid]
        blocks = s.table.blocks
        first = s.table.num_tokens
        for at in range(first, first + (s.reserved or 0)):
            entry = self.kv(s.who, s.border, s.tokens, at) if valid else GARBAGE
            self.device[blocks[at // self.size]][at % self.size] = entry

    def compute(self, s: Sequence) -> None:
        assert s.reserved is not None
        self.write(s, True)
        if s.copies:
            self.let_go([c.source for c in s.copies], s.table.batch)
        s.table.commit(s.reserved)
        s.reserved, s.copies = None, []

    def publish(self, s: Sequence, tail: bool) -> None:
        n, border = s.table.num_tokens, s.border
        whole = [*range(self.size, n + 1, self.size)]
        tail = tail or (border is not None and n == len(border.tokens))
        ends = [*whole, n] if tail and n % self.size else whole
        if border is not None:
            length = len(border.tokens)
            if border.withdrawn or tuple(s.tokens[:length]) != border.tokens[: len(s.tokens)]:
                ends = []
        offered = {(self.place(s.who, border, end), *s.tokens[:end]) for end in ends}
        self.published |= offered
        others: list[Lease | BlockTable] = [x.table for x in self.sequences if x is not s]
        others += [waiting.lease for waiting in self.leases]
        own = {*s.table.blocks[s.table.num_published :].tolist()}
        shared = any(not own.isdisjoint(other.references()) for other in others)
        s.table.publish(encode(s.tokens), tail=tail)
        for path, block in self.look().items():
            # Only tails go: a longer one has come, or the block was filled and is another now.
            assert (len(path) - 1) % self.size
            assert self.is_covered(path) or block in s.table.references()
        assert self.cache.stats().evicted_blocks == self.evicted
        if not shared and not s.copies:  # what others hold too may have to wait until they let go
            assert all(map(self.is_covered, offered))

    def fork(self, s: Sequence) -> None:
        twin = s.table.fork()
        assert twin.blocks.tolist() == s.table.blocks[: twin.num_blocks].tolist()
        assert twin.batch == s.table.batch
        self.sequences.append(Sequence(s.who, twin, s.tokens[: twin.num_tokens], s.border))

    def truncate(self, s: Sequence, n: int) -> None:
        n = min(n, s.table.num_tokens)
        self.let_go(s.table.blocks[-(-n // self.size) :].tolist(), s.table.batch)
        s.table.truncate(n)
        del s.tokens[n:]

    def abort(self, s: Sequence, wrote: bool) -> None:
        """End it at whatever stage; the device may have written to what was reserved already."""
        if wrote:
            self.write(s, False)
        self.sequences.remove(s)
        self.let_go(s.table.references(), s.table.batch)
        s.table.release()
        s.table.release()
        self.expect_swept(s.who, s.border)

    def press(self, n: int, who: int = 0) -> None:
        """Somebody unrelated needs blocks for a moment, and fills them."""
        n = min(n, self.cache.available_to(self.shares.tenant_of[who]))
        self.count(who, 1, 0, 0)
        resident, held = self.resident, self.held()
        with self.cache.open(self.cache.acquire(self.identities[who], b"")) as table:
            table.reserve(n * self.size)
            self.expect_evicted(resident, held, who)
            for block in table.blocks:
                self.device[block] = [GARBAGE] * self.size

    def share(self, who: int, quota: int | None, floor: int) -> None:
        """An operator changes what a tenant may keep."""
        tenant, shares = self.shares.tenant_of[who], self.shares
        others = shares.floor.total() - shares.floor[tenant]
        if others + floor > self.cache.num_blocks or (quota is not None and quota < floor):
            with pytest.raises(InvalidConfig, match="floor"):
                self.cache.set_share(tenant, quota=quota, floor=floor)
            return
        self.cache.set_share(tenant, quota=quota, floor=floor)
        shares.quota[tenant], shares.floor[tenant] = quota, floor

    def declare(self, tokens: list[int]) -> None:
        """An admin makes a prefix public to all tenants of the first identity's model."""
        prefix = self.cache.declare_public(self.identities[0], encode(tokens))
        known = [b for b in self.borders if b.prefix is prefix]
        assert bool(known) == any(
            b.tokens == tuple(tokens) and not b.withdrawn for b in self.borders
        )
        if not known:
            self.borders.append(Border(0, tuple(tokens), prefix))

    def withdraw(self, choice: int) -> None:
        """And takes it back, whoever is using it."""
        border = self.borders[choice % len(self.borders)]
        border.withdrawn = True
        self.cache.withdraw_public(border.prefix)
        self.expect_swept(None, border)

    def reset(self) -> None:
        if self.sequences or self.leases:
            with pytest.raises(CacheBusy, match="in use"):
                self.cache.reset()
            return
        cached = self.cache.cached_blocks
        assert self.cache.reset() == cached
        assert self.cache.free_blocks == self.cache.num_blocks
        self.look()

    def end(self) -> None:
        """Let all users go, and see that nothing stays behind."""
        for waiting in self.leases:
            waiting.lease.release()
        for s in self.sequences:
            s.table.release()
        assert self.cache.check() == []
        assert self.cache.available == self.cache.num_blocks

    # -- what always holds ---------------------------------------------------------------------

    def prove(self) -> None:
        """The books are right, only what nobody used has gone, and everybody reads his own KV."""
        assert self.cache.check() == []
        stats = self.cache.stats()
        assert stats.free_blocks + stats.referenced_blocks == stats.num_blocks
        assert stats.used_blocks == len(self.held())
        assert self.look() == {} and stats.evicted_blocks == self.evicted
        self.shares.prove(self.cache, self.resident, self.held())
        for w in self.leases:
            blocks = w.lease.blocks.tolist()
            self.expect_kv(w.who, w.border, w.tokens, blocks, w.lease.cached_tokens)
        for s in self.sequences:
            if not s.copies:  # a block to be copied into is not read before
                blocks = s.table.blocks.tolist()
                self.expect_kv(s.who, s.border, s.tokens, blocks, s.table.num_tokens)

    def expect_kv(
        self, who: int, border: Border | None, tokens: list[int], blocks: list[int], n: int
    ) -> None:
        for at in range(n):
            kv = self.device[blocks[at // self.size]][at % self.size]
            assert kv == self.kv(who, border, tokens, at), f"position {at} reads {kv}"
