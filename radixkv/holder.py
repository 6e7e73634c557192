"""A hold on the beginning of a path: what leases and tables have in common.

Knows which blocks are held and how the hold is named; nothing of positions to be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.blocks import NO_BLOCKS, BlockIds
from radixkv.identity.identity import CacheIdentity
from radixkv.nodes import Node
from radixkv.shrinking import disown, prune

if TYPE_CHECKING:
    from typing import Self

    from radixkv.accounts import Account, Terms
    from radixkv.cache import PrefixCache


class Holder:
    """Blocks in order, the first ``_num_in`` of them in the tree or once in it.

    Those are held through it: the hold is named by ``_node`` and ``_depth``, ``None`` and 0 while
    there are none, and may reach deeper than they do, never less deep. Counts as a user of its
    cache from the beginning until ``released``. Its ``_terms``
    say for whom it works. As batch work, its use of a block makes that no younger than what
    interactive work has used; what lies behind the public prefix that it began with is private.
    """

    __slots__ = (
        "_cache",
        "_depth",
        "_ids",
        "_node",
        "_num_in",
        "_terms",
        "cached_tokens",
        "identity",
        "released",
    )

    def __init__(
        self,
        cache: PrefixCache,
        identity: CacheIdentity,
        ids: BlockIds,
        node: Node | None,
        depth: int,
        cached_tokens: int,
        terms: Terms,
    ) -> None:
        self._cache = cache
        self._terms = terms
        self._ids = ids
        self._node = node
        self._depth = self._num_in = depth
        self.identity = identity
        self.cached_tokens = cached_tokens
        self.released = False
        cache._live.add(self)

    @property
    def batch(self) -> bool:
        """Whether it is batch work, which nobody waits for."""
        return self._terms.batch

    @property
    def _account(self) -> Account:
        """On whose account it works."""
        return self._terms.account

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """The physical blocks in order, the last perhaps in part; a copy. [n] int32."""
        return np.array(self._ids, np.int32)

    def release(self) -> None:
        """Let the blocks go: what is in the tree stays cached, the rest is free. Idempotent."""
        if self.released:
            return
        self.released = True
        self._cache._live.discard(self)
        if self._node is not None:
            if self._terms.plain:
                self._cache.tree.release(self._node, self._depth)
            else:
                self._cache.tree.release_as(self._node, self._depth, self._terms)
        self._ids, self._node, self._depth, self._num_in = NO_BLOCKS, None, 0, 0
        if not self._terms.plain:
            self._sweep()

    def _sweep(self) -> None:
        """Free what nobody finds any more, behind a prefix that was withdrawn."""
        border = self._terms.border
        if border is not None and border.withdrawn and self.identity in border.mounts:
            prune(self._cache.tree, border.mounts[self.identity])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def references(self) -> list[int]:
        """Return each block that is held from being reused."""
        return self._ids.tolist()

    def own_references(self) -> list[int]:
        """Return each of them that is not held through the tree."""
        return self._ids[self._num_in :].tolist()

    # -- moving the hold ---------------------------------------------------------------------------

    def _hold_only(self, depth: int) -> None:
        """Let go what the tree holds for us behind ``depth``."""
        assert self._node is not None
        tree, node, end = self._cache.tree, self._node, self._depth
        self._node, self._depth = tree.hold(node, depth) if depth else None, depth
        if self._terms.plain:
            tree.release(node, end)
        else:
            tree.release_as(node, end, self._terms)

    def _is_in(self, at: int, size: int) -> bool:
        """Tell whether the first ``size`` bytes of block ``at`` can be found in the tree."""
        assert self._node is not None
        node = self._node.at(at + 1)
        return len(node.key) - (at - node.start) * self._cache.tree.stride >= size

    def _take_back(self, at: int) -> bool:
        """Have block ``at``, which is or was a tail, for us alone; False while others have it too.

        As after a tail was published though the room behind it was reserved, and has been filled.
        """
        assert self._node is not None
        node = self._node.at(at + 1)
        if node.locks > 1 or len(node.key) >= self._cache.tree.stride:
            return False
        self._take_over(at)
        return True

    def _is_left_to_us(self, at: int) -> bool:
        """Tell whether block ``at`` was a tail, is replaced by a longer one and ours alone."""
        if self._node is None or at != self._depth - 1:
            return False
        node = self._node.at(self._depth)
        return not node.key and node.locks == 1

    def _note_taken_over(self) -> None:
        """Count the last block that we hold as evicted by us."""
        assert self._node is not None
        self._cache.tree.num_evicted += 1
        if self._cache.tree.many:
            self._node.at(self._depth).root.account.suffered += 1
            self._account.caused += 1

    def _can_take_over(self, at: int) -> bool:
        """Tell whether block ``at`` is only ours and the tree's, so the tree could let it go."""
        if self._node is None or at != self._depth - 1:
            return False
        node = self._node.at(self._depth)
        owner = node.root.account
        if owner is not self._account and owner.blocks <= owner.floor:
            return False
        return node.num_holding(self._depth) == 1

    def _take_over(self, at: int) -> None:
        """Make block ``at`` our own, which is left to us or which the tree can let go."""
        assert self._node is not None and at == self._depth - 1
        node = self._node.at(self._depth)
        if node.key:
            above = disown(self._cache.tree, node, self._depth)
        else:
            node.locks = 0  # its hold on the path before it is ours
            above = node.above() if at else node
        self._node = above if at else None
        self._depth = self._num_in = at

    def _hold_with(self, other: Holder) -> bool:
        """Hold through the tree what of our own blocks ``other`` does; tell if there is any."""
        first = at = self._num_in
        last = min(other._num_in, len(self._ids))
        while at < last and self._ids[at] == other._ids[at]:
            at += 1
        if at == first or other._node is None:
            return False
        tree = self._cache.tree
        node = tree.hold(other._node, at)
        if self._node is not None:
            tree.let_go(self._node.at(self._depth), self._depth)
        tree.pool.drop(self._ids[first:at])
        self._node, self._depth, self._num_in = node, at, at
        return True
