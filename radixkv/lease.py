"""A hold on the beginning of a path: what leases and tables have in common, and leases.

Knows which blocks are held and how the hold is named; nothing of positions to be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.blocks import NO_BLOCKS, BlockIds
from radixkv.identity.identity import CacheIdentity
from radixkv.nodes import Node

if TYPE_CHECKING:
    from typing import Self

    from radixkv.cache import PrefixCache


class Holder:
    """Blocks in order, the first of them held through the tree: to ``_depth``, seen from ``_node``.

    Counts as a user of its cache from the beginning until ``released``.
    """

    __slots__ = ("_cache", "_depth", "_ids", "_node", "cached_tokens", "identity", "released")

    def __init__(
        self,
        cache: PrefixCache,
        identity: CacheIdentity,
        ids: BlockIds,
        node: Node | None,
        depth: int,
        cached_tokens: int,
    ) -> None:
        self._cache = cache
        self._ids = ids
        self._node = node  # None while nothing is held through the tree
        self._depth = depth
        self.identity = identity
        self.cached_tokens = cached_tokens
        self.released = False
        cache._live.add(self)

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
            self._cache.tree.release(self._node, self._depth)
        self._ids, self._node, self._depth = NO_BLOCKS, None, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def references(self) -> list[int]:
        """Return each block that is held from being reused."""
        return self._ids.tolist()

    def own_references(self) -> list[int]:
        """Return each of them that is not held through the tree."""
        return []


class Lease(Holder):
    """A hold on the resident prefix of a sequence: while it lives, no block of it goes.

    ``cached_tokens`` counts whole blocks and the beginning of one more, which is to be copied
    before it is written behind. End it with ``release()`` (idempotent), by leaving its context, or
    by handing it to ``PrefixCache.open``.
    """

    # Tokens asked for, found in a partial block, was it a resumption; set by the cache.
    __slots__ = ("_counted",)

    _counted: tuple[int, int, bool]

    def cancel(self) -> None:
        """Release it, and take back what its acquisition counted: it was looked at, never used."""
        if self.released:
            return
        self._cache._count(-1, self._counted, self.cached_tokens)
        self.release()
