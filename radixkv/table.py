"""The blocks of one sequence, in order, and the right to write behind its last token.

Knows positions and block ids; of tokens only that equal ones may share. Moves no KV itself: what
must be copied is returned, for whoever runs the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.errors import OutOfBlocks
from radixkv.identity.identity import CacheIdentity
from radixkv.tokens import encode
from radixkv.tree import Place

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

_RELEASED = "this table was released"


class BlockTable:
    """Logical block -> physical block, and how many tokens' KV exists.

        positions   0 ........ num_tokens ........ len(blocks) * block_size
                    | KV exists | reserved: may be written |

    Holds one reference to each block, released by ``release()`` or on leaving its context. The
    first ``num_published`` blocks are in the tree. Blocks that others hold too are never written:
    ``reserve`` replaces the one under the write position by a copy. Not thread-safe.
    """

    __slots__ = (
        "_cache",
        "_held",
        "_ids",
        "_len",
        "_place",
        "cached_tokens",
        "identity",
        "num_published",
        "num_tokens",
        "released",
    )

    def __init__(
        self,
        cache: PrefixCache,
        identity: CacheIdentity,
        ids: BlockIds,
        num_blocks: int,
        num_tokens: int,
        place: Place,
    ) -> None:
        self._cache = cache
        self._ids = ids  # perhaps with room to spare; the first _len are ours
        self._len = num_blocks
        self._held: list[int] = []  # sources of copies that the device has yet to make
        self._place = place  # of the published part
        self.identity = identity
        self.num_tokens = num_tokens
        self.cached_tokens = num_tokens
        self.num_published = place[1]
        self.released = False
        cache._live.add(self)

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """The physical blocks in order, reserved ones included; a copy. [n] int32."""
        return self._ids[: self._len].astype(np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks held, reserved ones included."""
        return self._len

    def blocks_needed(self, n: int) -> int:
        """Return how many new blocks ``reserve(n)`` would take now, a copy's target included."""
        cache = self._cache
        size = cache.block_size
        needed = max(0, -(-(self.num_tokens + n) // size) - self._len)
        if n > 0 and self.num_tokens % size and self._is_shared(self.num_tokens // size):
            needed += 1
            if needed == cache.available + 1 and self._can_take_over(self.num_tokens // size):
                needed -= 1
        return needed

    def reserve(self, n: int) -> list[BlockCopy]:
        """Make positions ``[num_tokens, num_tokens + n)`` writable; return what to copy first.

        All or nothing: OutOfBlocks leaves everything as it was. The source of a copy stays
        referenced until ``commit()``, so it may be read until then.
        """
        if self.released:
            raise ValueError(_RELEASED)
        if n < 0:
            raise ValueError(f"reserve({n}); wanted 0 or more")
        tree, num_tokens = self._cache.tree, self.num_tokens
        size = tree.block_size
        new = -(-(num_tokens + n) // size) - self._len
        if new < 0:
            new = 0
        at, num_valid = num_tokens // size, num_tokens % size
        copies = num_valid > 0 and n > 0 and self._is_shared(at)
        if new + copies > tree.pool.free + tree.evictable:
            if not (copies and new == self._cache.available and self._can_take_over(at)):
                raise OutOfBlocks(new + copies, tree.pool.free, tree.evictable)
            # The block to copy is held by us and the tree alone, and its room is needed: rather
            # than fail beside it, take it out of the tree and write in place.
            tree.evict(tree.evictable)
            tree.disown(self._ids.item(at))
            copies = False
        source = self._ids.item(at) if copies else None
        # The copy's target is taken in one go with what follows it, where it is the last block.
        first = at if copies and at == self._len - 1 else self._len
        end = self._len + new
        if end > len(self._ids):
            self._grow(end)
        if end - first == 1:
            self._ids[first] = tree.take_one()
        elif end > first:
            tree.take(self._ids[first:end])
        self._len = end
        if source is None:
            return []
        if first > at:
            self._ids[at] = tree.take_one()
        return [self._copy(source, self._ids.item(at), num_valid)]

    def _copy(self, source: int, target: int, num_valid: int) -> BlockCopy:
        """Note a copy that the device is to make: until then ``source`` stays held."""
        cache = self._cache
        self._held.append(source)
        holds, most = cache._copying.get(source, (0, 0))
        cache._copying[source] = (holds + 1, most if most > num_valid else num_valid)
        cache._cow_copies += 1
        return BlockCopy(source, target, num_valid)

    def commit(self, n: int) -> None:
        """Note that the device has made the copies and the KV of ``n`` more tokens."""
        if self.released:
            raise ValueError(_RELEASED)
        if not 0 <= n <= self._len * self._cache.block_size - self.num_tokens:
            raise ValueError(
                f"commit({n}): {self._len * self._cache.block_size - self.num_tokens} reserved"
            )
        self.num_tokens += n
        if self._held:
            self._let_sources_go()

    def publish(self, tokens: bytes, *, tail: bool = False) -> None:
        """Let others share the whole blocks of the first ``num_tokens``, whose KV exists.

        ``tokens`` are the sequence's, at least that many. Where equal blocks are resident the table
        is pointed at them and its own are freed. With ``tail`` the tokens behind the last whole
        block are shared too, unless their block is a copy that the device has yet to make. O(what
        is new), plus a memcmp of the rest in the worst case.
        """
        if self.released:
            raise ValueError(_RELEASED)
        cache = self._cache
        if not cache.enabled:
            return
        if type(tokens) is not bytes:
            tokens = encode(tokens)
        num_whole, rest = divmod(self.num_tokens, cache.block_size)
        if len(tokens) < 4 * self.num_tokens:
            raise ValueError(f"{len(tokens) // 4} tokens given; KV exists for {self.num_tokens}")
        if num_whole > self.num_published:
            self._place = cache.tree.insert(
                self.identity, tokens, self._ids[:num_whole], self.num_published, self._place
            )
            self.num_published = self._place[1]
        if tail and rest and self.num_published == num_whole and not self._held:
            end = 4 * self.num_tokens
            key = tokens if len(tokens) == end else tokens[:end]
            cache.tree.insert_tail(self.identity, key, self._ids[: num_whole + 1], self._place)

    def fork(self) -> BlockTable:
        """Return a second table of the same tokens: it shares their blocks and copies on write."""
        if self.released:
            raise ValueError(_RELEASED)
        ids = self._ids[: -(-self.num_tokens // self._cache.block_size)].copy()
        if len(ids):
            self._cache.pool.share(ids)
        twin = BlockTable(self._cache, self.identity, ids, len(ids), self.num_tokens, self._place)
        twin.cached_tokens = self.cached_tokens
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` and let go the blocks behind them, reserved ones too."""
        if self.released:
            raise ValueError(_RELEASED)
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"truncate({num_tokens}): KV exists for {self.num_tokens} tokens")
        size = self._cache.block_size
        keep = -(-num_tokens // size)
        gone = self._ids[keep : self._len]
        self._len = keep
        self.num_tokens = num_tokens
        published = self.num_published
        if published > num_tokens // size:
            self.num_published = num_tokens // size
            self._place = (None, self.num_published, self._place[2])
        if gone.size:
            self._cache.tree.release(gone, max(published - keep, 0))

    def release(self) -> None:
        """Let all blocks go: what was published stays cached, the rest is free. Idempotent."""
        if self.released:
            return
        self.released = True
        self._cache._live.discard(self)
        if self._held:
            self._let_sources_go()
        if self._len:
            self._cache.tree.release(self._ids[: self._len], self.num_published)
        self._len = 0

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def references(self) -> list[int]:
        """Return each block that this table holds a reference to, copy sources included."""
        return [*self._ids[: self._len].tolist(), *self._held]

    def _is_shared(self, at: int) -> bool:
        """Tell whether writing behind our last token, in block ``at``, could harm anybody else.

        Those who only wait for their copy of it read no further than their own last token, so of k
        sharers k - 1 copy and the last writes in place, even if all reserve before the device runs.
        """
        block = self._ids.item(at)
        users = self._cache.pool.counts.item(block)
        if users > 1 and block in self._cache._copying:
            holds, most = self._cache._copying[block]
            if most <= self.num_tokens % self._cache.block_size:
                users -= holds
        return users > 1

    def _can_take_over(self, at: int) -> bool:
        """Tell whether the block is held by us and the tree alone, so the tree could let it go."""
        block = self._ids.item(at)
        return self._cache.pool.counts.item(block) == 2 and self._cache.tree.cached.item(block)

    def _grow(self, least: int) -> None:
        room = np.empty(least + least // 4 + 8, np.int64)
        room[: self._len] = self._ids[: self._len]
        self._ids = room

    def _let_sources_go(self) -> None:
        copying = self._cache._copying
        for block in self._held:
            holds, most = copying.pop(block)
            if holds > 1:
                copying[block] = (holds - 1, most)
            self._cache.tree.release_source(block)
        self._held.clear()
