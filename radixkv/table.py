"""The blocks of one sequence, in order, and the right to write behind its last token.

Knows positions and block ids; of tokens only that equal ones may share. Moves no KV itself: what
must be copied is returned, for whoever runs the device.
"""

from __future__ import annotations

from array import array

from radixkv.blocks import BlockCopy, BlockIds
from radixkv.errors import OutOfBlocks
from radixkv.holder import Holder
from radixkv.nodes import Node
from radixkv.publishing import publish
from radixkv.shrinking import evict, take

_RELEASED = "this table was released"


class BlockTable(Holder):
    """Logical block -> physical block, and how many tokens' KV exists.

        positions   0 ........ num_tokens ........ len(blocks) * block_size
                    | KV exists | reserved: may be written |

        blocks      0 ...... _num_in ...... len(blocks)
                    | in the tree | ours |

    What is in the tree is held through it, the rest by a reference to each block; both are let go
    by ``release()`` or on leaving its context. The first ``num_published`` blocks are whole and in
    the tree; one more may be in that we have filled, or use, in part. Blocks that others hold too
    are never written: ``reserve`` replaces the one under the write position by a copy, and its
    source stays held until ``commit``. Not thread-safe.
    """

    __slots__ = ("_forks", "_moved", "_sources", "_sources_in", "num_published", "num_tokens")

    def __init__(
        self,
        origin: Holder,
        ids: BlockIds,
        node: Node | None,
        depth: int,
        num_tokens: int,
    ) -> None:
        """Begin a sequence of the same kind as ``origin``, which gave us this hold."""
        super().__init__(
            origin._cache,
            origin.identity,
            ids,
            node,
            depth,
            origin.cached_tokens,
            origin._terms,
        )
        self.num_tokens = num_tokens
        self.num_published = num_tokens // origin._cache.block_size
        # Sources of copies that the device has yet to make: those with a reference of ours, and
        # those in the tree, for which the hold is kept deeper than ``_num_in``.
        self._sources: list[int] = []
        self._sources_in: list[int] = []
        self._forks: set[BlockTable] | None = None  # those that we may share blocks of ours with
        self._moved = False  # we were pointed at resident blocks that the forks may not hold

    @property
    def num_blocks(self) -> int:
        """Blocks held, reserved ones included."""
        return len(self._ids)

    @property
    def tokens_to_border(self) -> int | None:
        """Tokens to where the public prefix that we begin with ends inside a block; None behind it.

        A step that ends there lets others share all of the prefix; one that does not, what of it
        fills blocks.
        """
        border, size = self._terms.border, self._cache.block_size
        if border is None or border.withdrawn or not border.num_tokens % size:
            return None
        left = border.num_tokens - self.num_tokens
        return left if left > 0 else None

    @property
    def _available(self) -> int:
        """Blocks that we could take now."""
        tree = self._cache.tree
        return tree.pool.free + tree.accounts.evictable_by(self._account, tree.evictable)

    # -- writing -----------------------------------------------------------------------------------

    def blocks_needed(self, n: int) -> int:
        """Return how many new blocks ``reserve(n)`` would take now, a copy's target included."""
        cache = self._cache
        size = cache.block_size
        needed = max(0, -(-(self.num_tokens + n) // size) - len(self._ids))
        if n > 0 and self.num_tokens % size and self._is_shared(self.num_tokens // size):
            needed += 1
            if needed == self._available + 1 and self._can_take_over(self.num_tokens // size):
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
        tree, ids = self._cache.tree, self._ids
        num_tokens, size = self.num_tokens, tree.block_size
        at, num_valid = num_tokens // size, num_tokens % size
        new = -(-(num_tokens + n) // size) - len(ids)
        if new < 0:
            new = 0
        writes = num_valid > 0 and n > 0  # into a block that exists already
        copies = writes and self._is_shared(at)
        if new + copies > tree.pool.free + tree.evictable - tree.accounts.protected:
            available = self._available  # of what floors protect, some may be our own
            if new + copies > available:
                if not (copies and new == available and self._can_take_over(at)):
                    raise OutOfBlocks(new + copies, tree.pool.free, available - tree.pool.free)
                # The block to copy is held by us and the tree alone, and its room is needed: rather
                # than fail beside it, take it out of the tree and write in place.
                evict(tree, tree.evictable, self._account)
                self._note_taken_over()
                copies = False
        if writes and not copies and at < self._num_in:
            self._take_over(at)
        if not new + copies:
            return []
        taken = take(tree, new + copies, self._terms.account)
        if not copies:
            ids += taken
            return []
        source, target = ids[at], taken.pop(0)
        ids[at] = target
        ids += taken
        self._cache._cow_copies += 1
        if at < self._num_in:
            self._num_in = at
            self._sources_in.append(source)
        else:
            self._sources.append(source)
            self._cache._copies.note(source, num_valid)
        return [BlockCopy(source, target, num_valid)]

    def commit(self, n: int) -> None:
        """Note that the device has made the copies and the KV of ``n`` more tokens."""
        if self.released:
            raise ValueError(_RELEASED)
        size = self._cache.block_size
        reserved = len(self._ids) * size - self.num_tokens
        if not 0 <= n <= reserved:
            raise ValueError(f"commit({n}): {reserved} reserved")
        self.num_tokens += n
        if self._sources_in:
            self._sources_in.clear()
            self._hold_only(self._num_in)
        if self._sources:
            self._let_sources_go()

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` and let go the blocks behind them, reserved ones too."""
        if self.released:
            raise ValueError(_RELEASED)
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"truncate({num_tokens}): KV exists for {self.num_tokens} tokens")
        size = self._cache.block_size
        keep = -(-num_tokens // size)
        self.num_tokens = num_tokens
        self.num_published = min(self.num_published, num_tokens // size)
        gone = self._ids[max(keep, self._num_in) :]
        del self._ids[keep:]
        if keep < self._num_in:
            self._num_in = keep
            if not self._sources_in:  # else with them
                self._hold_only(keep)
        self._cache.pool.drop(gone)

    def fork(self) -> BlockTable:
        """Return a second table of the same tokens: it shares their blocks and copies on write."""
        if self.released:
            raise ValueError(_RELEASED)
        cache = self._cache
        ids = self._ids[: -(-self.num_tokens // cache.block_size)]
        num_in = min(self._num_in, len(ids))
        cache.pool.share(ids[num_in:])
        node = cache.tree.hold(self._node, num_in) if num_in and self._node is not None else None
        twin = BlockTable(self, ids, node, num_in, self.num_tokens)
        twin.num_published = self.num_published
        twin._moved = self._moved
        if num_in < len(ids):
            if self._forks is None:
                self._forks = {self}
            twin._forks = self._forks
            self._forks.add(twin)
        return twin

    def release(self) -> None:
        """Let all blocks go: what was published stays cached, the rest is free. Idempotent."""
        if self.released:
            return
        if self._sources:
            self._let_sources_go()
        self._sources_in.clear()
        if self._forks is not None:
            self._forks.discard(self)
        if self._num_in < len(self._ids):
            self._cache.pool.drop(self._ids[self._num_in :])
        super().release()

    # -- sharing -----------------------------------------------------------------------------------

    def publish(self, tokens: bytes, *, tail: bool = False) -> None:
        """Let others share the whole blocks of the first ``num_tokens``, whose KV exists.

        ``tokens`` are the sequence's, at least that many. Where equal blocks are resident the table
        is pointed at them and its own are freed. With ``tail`` the tokens behind the last whole
        block are shared too, unless their block is a copy that the device has yet to make. What a
        fork shares, and is yet to be copied by it or lies behind what it does not hold, has to wait
        until it has let go. Nothing is shared any more of what began with a public prefix, once
        that is withdrawn or its tokens are others. O(what is new).
        """
        publish(self, tokens, tail)

    # -- whose blocks they are ---------------------------------------------------------------------

    def references(self) -> list[int]:
        """Return each block that is held from being reused, copy sources included."""
        return [*self._ids, *self._sources, *self._sources_in]

    def own_references(self) -> list[int]:
        """Return each of them that is not held through the tree."""
        return [*super().own_references(), *self._sources]

    def _is_shared(self, at: int) -> bool:
        """Tell whether writing behind our last token, in block ``at``, could harm anybody else.

        Those who only wait for their copy of it read no further than their own last token, so of k
        sharers k - 1 copy and the last writes in place, even if all reserve before the device runs.
        """
        if at < self._num_in:
            return not self._is_left_to_us(at)
        block = self._ids[at]
        users = self._cache.pool.references(block)
        if users > 1:
            users -= self._cache._copies.harmless(block, self.num_tokens % self._cache.block_size)
        return users > 1

    def _let_sources_go(self) -> None:
        for block in self._sources:
            self._cache._copies.forget(block)
            self._cache.pool.drop(array("i", [block]))
        self._sources.clear()
