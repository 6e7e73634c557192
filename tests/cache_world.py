"""A dull model beside a real cache: plain dicts, and a device that remembers what lies where.

Knows nothing of trees. It keeps, for each slot of each physical block, the path of tokens whose KV
lies there; so a block that was reused, overwritten or shared wrongly shows as a path that is not
the reader's. Every operation checks what it can by itself; ``prove`` checks the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from radixkv.blocks import BlockCopy
from radixkv.cache import PrefixCache
from radixkv.errors import CacheBusy, OutOfBlocks
from radixkv.identity.identity import CacheIdentity
from radixkv.lease import Lease
from radixkv.nodes import Node
from radixkv.table import BlockTable
from radixkv.tokens import decode, encode

Path = tuple[int, ...]  # who, then the tokens: what one KV entry depends on
GARBAGE: Path = (-1,)


@dataclass(eq=False)
class Sequence:
    """A table, the tokens it is to hold, and what was reserved for it."""

    who: int
    table: BlockTable
    tokens: list[int]
    reserved: int | None = None
    copies: list[BlockCopy] = field(default_factory=list)


class World:
    """A cache, its device and its users; the methods are what users do."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
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
        self.queries = self.queried = self.hits = 0

    def pick(self, choice: int, reserved: bool | None = None) -> Sequence | None:
        """One of the sequences, or of those (not) waiting for the device."""
        fit = [
            s for s in self.sequences if reserved is None or (s.reserved is not None) == reserved
        ]
        return fit[choice % len(fit)] if fit else None

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
        """Path -> block for all that the tree holds; proves that each holds that path's KV."""
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

    def acquire(self, who: int, tokens: list[int], spare: int) -> None:
        limit = len(tokens) - spare
        expected = max(0, min(self.longest(who, tokens), limit))
        key = encode(tokens)
        assert self.cache.lookup(self.identities[who], key, max_cached=limit) == expected
        version, nodes = self.cache.version, self.cache.stats().nodes
        lease = self.cache.acquire(self.identities[who], key, max_cached=limit)
        assert lease.cached_tokens == expected, "not the longest common prefix"
        after = (self.cache.version, self.cache.stats().nodes)
        assert after == (version, nodes), "a match has changed the tree"
        self.queries, self.queried = self.queries + 1, self.queried + len(tokens)
        self.hits += expected
        self.leases.append((lease, who, list(tokens)))

    def open(self, choice: int) -> Sequence:
        lease, who, tokens = self.leases.pop(choice % len(self.leases))
        table = self.cache.open(lease)
        lease.release()  # it has nothing left to release
        assert table.num_tokens == table.cached_tokens == lease.cached_tokens
        self.sequences.append(Sequence(who, table, tokens))
        return self.sequences[-1]

    def give_up(self, choice: int, cancel: bool = False) -> None:
        lease, _, tokens = self.leases.pop(choice % len(self.leases))
        self.let_go(lease.references())
        if cancel:
            self.queries, self.queried = self.queries - 1, self.queried - len(tokens)
            self.hits -= lease.cached_tokens
            lease.cancel()
        lease.release()
        lease.cancel()

    def begin(self, who: int, tokens: list[int], stage: int, tail: bool) -> None:
        """A request as most are: all at once, up to some stage."""
        self.acquire(who, tokens, 1)
        s = self.open(len(self.leases) - 1)
        if stage > 0:
            self.reserve(s, len(s.tokens) - s.table.num_tokens, [])
        if stage > 1 and s.reserved is not None:
            self.compute(s)
        if stage > 2 and s.reserved is None:
            self.publish(s, tail)
        if stage > 3:
            self.abort(s, wrote=True)

    def reserve(self, s: Sequence, n: int, more: list[int]) -> None:
        if len(s.tokens) < s.table.num_tokens + n:
            s.tokens += more
        n = min(n, len(s.tokens) - s.table.num_tokens)
        needed, available = s.table.blocks_needed(n), self.cache.available
        before, version = s.table.references(), self.cache.version
        try:
            copies = s.table.reserve(n)
        except OutOfBlocks:
            assert needed > available
            assert s.table.references() == before and self.cache.version == version
            assert self.cache.available == available
            return
        assert needed <= available
        assert available - self.cache.available == needed
        s.reserved, s.copies = n, copies
        held = self.held()
        for copy in copies:
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

    def compute(self, s: Sequence) -> None:
        assert s.reserved is not None
        self.write(s, s.tokens)
        if s.copies:
            self.let_go([c.source for c in s.copies])
        s.table.commit(s.reserved)
        s.reserved, s.copies = None, []

    def publish(self, s: Sequence, tail: bool) -> None:
        n = s.table.num_tokens
        ends = [*range(self.size, n + 1, self.size), *([n] if tail and n % self.size else [])]
        self.published |= {(s.who, *s.tokens[:end]) for end in ends}
        self.observe()
        others: list[Lease | BlockTable] = [x.table for x in self.sequences if x is not s]
        others += [lease for lease, _, _ in self.leases]
        own = {*s.table.blocks[s.table.num_published :].tolist()}
        shared = any(not own.isdisjoint(other.references()) for other in others)
        s.table.publish(encode(s.tokens), tail=tail)
        self.observe()
        if not shared and not s.copies:  # what others hold too may have to wait until they let go
            assert self.longest(s.who, s.tokens[:n]) >= (n if tail else n - n % self.size)

    def fork(self, s: Sequence) -> None:
        twin = s.table.fork()
        assert twin.blocks.tolist() == s.table.blocks[: twin.num_blocks].tolist()
        self.sequences.append(Sequence(s.who, twin, s.tokens[: twin.num_tokens]))

    def truncate(self, s: Sequence, n: int) -> None:
        n = min(n, s.table.num_tokens)
        self.let_go(s.table.blocks[-(-n // self.size) :].tolist())
        s.table.truncate(n)
        del s.tokens[n:]

    def abort(self, s: Sequence, wrote: bool) -> None:
        """End it at whatever stage; the device may have written to what was reserved already."""
        if wrote:
            self.write(s, None)
        self.sequences.remove(s)
        self.let_go(s.table.references())
        s.table.release()
        s.table.release()

    def press(self, n: int) -> None:
        """Somebody unrelated needs blocks for a moment, and fills them."""
        n = min(n, self.cache.available)
        self.queries += 1
        with self.cache.open(self.cache.acquire(self.identities[0], b"")) as table:
            table.reserve(n * self.size)
            for block in table.blocks:
                self.device[block] = [GARBAGE] * self.size

    def reset(self) -> None:
        if self.sequences or self.leases:
            with pytest.raises(CacheBusy, match="in use"):
                self.cache.reset()
            return
        cached = self.cache.cached_blocks
        assert self.cache.reset() == cached
        assert self.cache.free_blocks == self.cache.num_blocks
        self.resident = {}

    def end(self) -> None:
        """Let all users go, and see that nothing stays behind."""
        for lease, _, _ in self.leases:
            lease.release()
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
        counted = (stats.queries, stats.queried_tokens, stats.hit_tokens)
        assert counted == (self.queries, self.queried, self.hits)
        self.observe()
        for lease, who, tokens in self.leases:
            self.expect_kv(who, tokens, lease.blocks.tolist(), lease.cached_tokens)
        for s in self.sequences:
            if not s.copies:  # a block to be copied into is not read before
                self.expect_kv(s.who, s.tokens, s.table.blocks.tolist(), s.table.num_tokens)

    def expect_kv(self, who: int, tokens: list[int], blocks: list[int], n: int) -> None:
        for at in range(n):
            kv = self.device[blocks[at // self.size]][at % self.size]
            assert kv == (who, *tokens[: at + 1]), f"position {at} reads {kv}"
