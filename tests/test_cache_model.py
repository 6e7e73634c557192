"""The cache against a dull model: a device that remembers what was written where, and plain dicts.

The model knows nothing of trees. It keeps, for each slot of each physical block, the path of tokens
whose KV lies there; so a block that was reused, overwritten or shared wrongly shows as a path that
is not the reader's. Three tokens and small blocks, so that everything splits at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from radixkv.blocks import BlockCopy
from radixkv.cache import Lease, PrefixCache
from radixkv.errors import CacheBusy, OutOfBlocks
from radixkv.identity.identity import CacheIdentity
from radixkv.table import BlockTable
from radixkv.tokens import decode, encode
from radixkv.tree import Node

Path = tuple[int, ...]  # who, then the tokens: what one KV entry depends on
GARBAGE: Path = (-1,)

# Runs of equal tokens: short ones split small blocks, long ones fill the blocks of sixteen.
runs = st.tuples(st.integers(0, 2), st.sampled_from([1, 1, 2, 3, 5, 15, 16, 17]))
texts = st.lists(runs, min_size=1, max_size=5).map(lambda rs: [t for t, n in rs for _ in range(n)])


@dataclass(eq=False)
class Sequence:
    """A table, the tokens it is to hold, and what was reserved for it."""

    who: int
    table: BlockTable
    tokens: list[int]
    reserved: int | None = None
    copies: list[BlockCopy] = field(default_factory=list)


class CacheAgainstModel(RuleBasedStateMachine):
    @initialize(block_size=st.sampled_from([1, 2, 3, 16]), num_blocks=st.integers(3, 14))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.size = block_size
        self.cache = PrefixCache(num_blocks, block_size)
        self.identities = [CacheIdentity.local(f"model {i}", block_size) for i in range(2)]
        self.device = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.leases: list[tuple[Lease, int, list[int]]] = []
        self.sequences: list[Sequence] = []
        self.resident: dict[Path, int] = {}  # path of a block (or tail) -> block, as last seen
        self.published: set[Path] = set()  # every path that anyone has offered
        self.last_use: dict[int, int] = {}  # block -> when it was last let go
        self.now = 0
        self.evicted = 0

    # -- what is true --------------------------------------------------------------------------

    def longest(self, who: int, tokens: list[int]) -> int:
        """The longest common prefix with any resident path, the slow way."""
        best = 0
        for path in self.resident:
            if path[0] != who:
                continue
            n = 0
            for mine, theirs in zip(tokens, path[1:], strict=False):
                if mine != theirs:
                    break
                n += 1
            best = max(best, n)
        return best

    def held(self) -> set[int]:
        users: list[Lease | BlockTable] = [s.table for s in self.sequences]
        users += [lease for lease, _, _ in self.leases]
        return {block for user in users for block in user.references()}

    def walk(self) -> dict[Path, int]:
        """Path -> block for all the tree holds; proves on the way that each holds that path's KV."""
        found: dict[Path, int] = {}
        for identity, root in self.cache.tree.roots.items():
            who = self.identities.index(identity)
            pending: list[tuple[Node, list[int]]] = [(root, [])]
            while pending:
                node, before = pending.pop()
                tokens = before + decode(node.key)
                for i, block in enumerate(node.blocks):
                    end = min(len(before) + (i + 1) * self.size, len(tokens))
                    found[(who, *tokens[:end])] = block
                    for at in range(len(before) + i * self.size, end):
                        assert self.device[block][at % self.size] == (who, *tokens[: at + 1])
                pending += [(child, tokens) for child in (node.children or {}).values()]
        return found

    def observe(self) -> None:
        """Compare the tree with what it was: only what nobody used may go, and the oldest first."""
        found = self.walk()
        assert set(found) <= self.published, "the tree holds what nobody published"
        gone = {p: b for p, b in self.resident.items() if p not in found}
        superseded = {
            p for p in gone if (len(p) - 1) % self.size and any(q[: len(p)] == p for q in found)
        }
        evicted = [b for p, b in gone.items() if p not in superseded]
        count = self.cache.stats().evicted_blocks - self.evicted
        self.evicted += count
        # A tail that its successor replaced may have been evicted before that.
        assert len(evicted) <= count <= len(gone)
        held = self.held()
        idle = [self.last_use.get(b, 0) for b in found.values() if b not in held]
        if evicted and idle and count == len(evicted):
            assert max(self.last_use.get(b, 0) for b in evicted) <= min(idle), "not the oldest"
        self.resident = found

    def let_go(self, blocks: list[int]) -> None:
        self.now += 1
        for block in blocks:
            self.last_use[block] = self.now

    # -- what users do -------------------------------------------------------------------------

    @rule(who=st.integers(0, 1), tokens=texts, spare=st.sampled_from([0, 1, 1, 3]))
    def acquire(self, who: int, tokens: list[int], spare: int) -> None:
        limit = len(tokens) - spare
        expected = max(0, min(self.longest(who, tokens), limit))
        key = encode(tokens)
        assert self.cache.lookup(self.identities[who], key, max_cached=limit) == expected
        version = self.cache.version
        lease = self.cache.acquire(self.identities[who], key, max_cached=limit)
        assert lease.cached_tokens == expected
        assert self.cache.version == version, "a match has changed the tree"
        self.leases.append((lease, who, tokens))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, who, tokens = self.leases.pop(at)
        table = self.cache.open(lease)
        lease.release()  # it has nothing left to release
        assert table.num_tokens == table.cached_tokens == lease.cached_tokens
        self.sequences.append(Sequence(who, table, tokens))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_up_lease(self, data: st.DataObject) -> None:
        lease, _, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.let_go(lease.references())
        lease.release()
        lease.release()

    def some(self, data: st.DataObject, reserved: bool | None = None) -> Sequence | None:
        fit = [s for s in self.sequences if reserved is None or (s.reserved is not None) == reserved]
        return data.draw(st.sampled_from(fit)) if fit else None

    @rule(data=st.data(), n=st.integers(0, 20), more=texts)
    def reserve(self, data: st.DataObject, n: int, more: list[int]) -> None:
        s = self.some(data, reserved=False)
        if s is None:
            return
        if len(s.tokens) < s.table.num_tokens + n:
            s.tokens += more
        n = min(n, len(s.tokens) - s.table.num_tokens)
        needed, available = s.table.blocks_needed(n), self.cache.available
        before = s.table.blocks.tolist()
        free = self.cache.free_blocks
        try:
            s.copies = s.table.reserve(n)
        except OutOfBlocks:
            assert needed > available
            assert s.table.blocks.tolist() == before and self.cache.free_blocks == free
            return
        assert needed <= available
        assert available - self.cache.available == needed
        s.reserved = n
        held = self.held()
        for copy in s.copies:
            assert copy.source in held and copy.target in s.table.blocks
            assert copy.num_valid == s.table.num_tokens % self.size

    def write(self, s: Sequence, kv_of: list[int] | None) -> None:
        """What the device does in a step: the copies, then the KV of the reserved positions."""
        for source, target, num_valid in s.copies:
            self.device[target][:num_valid] = self.device[source][:num_valid]
        blocks = s.table.blocks
        first = s.table.num_tokens
        for at in range(first, first + (s.reserved or 0)):
            entry = GARBAGE if kv_of is None else (s.who, *kv_of[: at + 1])
            self.device[blocks[at // self.size]][at % self.size] = entry

    @rule(data=st.data(), publish=st.sampled_from(["no", "whole", "tail"]))
    def compute(self, data: st.DataObject, publish: str) -> None:
        s = self.some(data, reserved=True)
        if s is None or s.reserved is None:
            return
        self.write(s, s.tokens)
        if s.copies:
            self.let_go([c.source for c in s.copies])
        s.table.commit(s.reserved)
        s.reserved, s.copies = None, []
        if publish != "no":
            self.publish_sequence(s, tail=publish == "tail")

    @rule(data=st.data(), tail=st.booleans())
    def publish(self, data: st.DataObject, tail: bool) -> None:
        s = self.some(data, reserved=False)
        if s is not None:
            self.publish_sequence(s, tail)

    def publish_sequence(self, s: Sequence, tail: bool) -> None:
        n = s.table.num_tokens
        ends = [*range(self.size, n + 1, self.size), *([n] if tail and n % self.size else [])]
        self.published |= {(s.who, *s.tokens[:end]) for end in ends}
        self.observe()
        evicted = self.cache.stats().evicted_blocks
        s.table.publish(encode(s.tokens), tail=tail)
        assert self.cache.stats().evicted_blocks == evicted
        self.observe()
        assert self.longest(s.who, s.tokens[:n]) >= (n if tail else n - n % self.size)

    @precondition(lambda self: len(self.sequences) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        s = self.some(data, reserved=False)
        if s is None:
            return
        twin = s.table.fork()
        assert twin.blocks.tolist() == s.table.blocks[: len(twin.blocks)].tolist()
        self.sequences.append(Sequence(s.who, twin, s.tokens[: twin.num_tokens]))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        s = self.some(data, reserved=False)
        if s is None:
            return
        n = data.draw(st.integers(0, s.table.num_tokens))
        self.let_go(s.table.blocks[-(-n // self.size) :].tolist())
        s.table.truncate(n)
        del s.tokens[n:]

    @rule(data=st.data(), tail=st.booleans())
    def finish(self, data: st.DataObject, tail: bool) -> None:
        s = self.some(data, reserved=False)
        if s is None:
            return
        self.publish_sequence(s, tail)
        self.release(s)

    @rule(data=st.data(), wrote=st.booleans())
    def abort(self, data: st.DataObject, wrote: bool) -> None:
        """At any stage; the device may have written to what was reserved already."""
        s = self.some(data)
        if s is None:
            return
        if wrote:
            self.write(s, None)
        self.release(s)

    def release(self, s: Sequence) -> None:
        self.sequences.remove(s)
        self.let_go(s.table.references())
        s.table.release()
        s.table.release()

    @rule(n=st.integers(1, 4))
    def press(self, n: int) -> None:
        """Somebody unrelated needs blocks for a moment."""
        n = min(n, self.cache.available)
        with self.cache.open(self.cache.acquire(self.identities[0], b"")) as table:
            table.reserve(n * self.size)
            for block in table.blocks:
                self.device[block] = [GARBAGE] * self.size

    @rule()
    def reset(self) -> None:
        self.observe()
        if self.sequences or self.leases:
            with pytest.raises(CacheBusy, match="in use"):
                self.cache.reset()
            return
        cached = self.cache.cached_blocks
        assert self.cache.reset() == cached
        assert self.cache.free_blocks == self.cache.num_blocks
        self.resident = {}

    # -- what always holds ---------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.check() == []
        stats = self.cache.stats()
        assert stats.free_blocks + stats.referenced_blocks == stats.num_blocks
        assert stats.used_blocks == len(self.held())

    @invariant()
    def only_what_nobody_used_has_gone(self) -> None:
        self.observe()

    @invariant()
    def everybody_reads_his_own_kv(self) -> None:
        for lease, who, tokens in self.leases:
            self.expect_kv(who, tokens, lease.blocks.tolist(), lease.cached_tokens)
        for s in self.sequences:
            if not s.copies:  # a block to be copied into is not read before
                self.expect_kv(s.who, s.tokens, s.table.blocks.tolist(), s.table.num_tokens)

    def expect_kv(self, who: int, tokens: list[int], blocks: list[int], n: int) -> None:
        for at in range(n):
            kv = self.device[blocks[at // self.size]][at % self.size]
            assert kv == (who, *tokens[: at + 1]), f"position {at} reads {kv}"

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lease, _, _ in self.leases:
            lease.release()
        for s in self.sequences:
            s.table.release()
        assert self.cache.check() == []
        assert self.cache.available == self.cache.num_blocks


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
