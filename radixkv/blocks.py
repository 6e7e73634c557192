"""The pool of KV blocks: which ids are free, and how many own each of the others.

Knows block ids and reference counts; nothing of tokens, trees or tensors.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import OutOfBlocks

BlockIds: TypeAlias = "array[int]"
"""Ids as ``array("i")``: cut, joined and compared in C without numpy's price per call."""

NO_BLOCKS: BlockIds = array("i")

_FEW = 24  # blocks up to which numpy costs more than it saves


class BlockCopy(NamedTuple):
    """Copy the first ``num_valid`` tokens of block ``source`` to block ``target``, all layers."""

    source: int
    target: int
    num_valid: int


class BlockPool:
    """Counts references to ``capacity`` blocks; a block with none is free.

    A block of the tree has one reference, the tree's, however many paths in use lead through it;
    a block of a table has one, or one for each fork that shares it.

    Conservation law, true between any two calls: ``free + referenced == capacity``.
    Every operation is O(blocks moved).
    """

    __slots__ = ("_count", "_stack", "capacity", "counts", "free")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool has {capacity} blocks; wanted at least 1")
        self.capacity = capacity
        self._count = array("i", bytes(4 * capacity))
        # The same memory as numpy sees it, for many blocks at once.
        self.counts: npt.NDArray[np.int32] = np.frombuffer(self._count, np.int32)
        self.free = capacity
        # The free ids. Taken and given in reverse, so that a fresh pool, and one that gets back
        # what it handed out, deals consecutive ids: contiguous memory on the device.
        self._stack: BlockIds = array("i", range(capacity - 1, -1, -1))

    @property
    def referenced(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - self.free

    def take(self, n: int) -> BlockIds:
        """Return ``n`` free blocks with one reference each, or raise OutOfBlocks and take none."""
        left = self.free - n
        if left < 0:
            raise OutOfBlocks(n, self.free, 0)
        ids = self._stack[left:]
        del self._stack[left:]
        ids.reverse()
        self.free = left
        if n > _FEW:
            self.counts[ids] = 1
        else:
            count = self._count
            for block in ids:
                count[block] = 1
        return ids

    def references(self, block: int) -> int:
        """Return how many references ``block`` has."""
        return self._count[block]

    def share(self, ids: BlockIds) -> None:
        """Add a reference to each of ``ids`` (distinct, each referenced already)."""
        free = [block for block in ids if not self._count[block]]
        if free:
            raise ValueError(f"shared a free block: {free}")
        for block in ids:
            self._count[block] += 1

    def drop(self, ids: BlockIds) -> int:
        """Take one reference from each of ``ids`` (distinct); return how many became free.

        A block without references is refused (ValueError), and then nothing is changed.
        """
        if len(ids) > _FEW:
            return self._drop_many(ids)
        count = self._count
        for block in ids:
            if not count[block]:
                raise ValueError(f"gave back a free block: {block}")
        stack = self._stack
        before = len(stack)
        for block in reversed(ids):
            left = count[block] = count[block] - 1
            if not left:
                stack.append(block)
        freed = len(stack) - before
        self.free += freed
        return freed

    def _drop_many(self, ids: BlockIds) -> int:
        which = np.array(ids)
        counts = self.counts[which] - 1
        if counts.min() < 0:
            raise ValueError(f"gave back a free block: {which[counts < 0].tolist()}")
        self.counts[which] = counts
        gone = which[counts == 0]
        self._stack.frombytes(gone[::-1].tobytes())
        self.free += len(gone)
        return len(gone)

    def reset(self) -> int:
        """Take all references back, whoever has them; return how many blocks that freed."""
        freed = self.referenced
        self.counts[:] = 0
        self.free = self.capacity
        self._stack = array("i", range(self.capacity - 1, -1, -1))
        return freed

    def check(self) -> list[str]:
        """Return each broken invariant in words. O(capacity)."""
        wrong = []
        if self.free != len(self._stack):
            wrong.append(f"{self.free} blocks are free by count, {len(self._stack)} by list")
        free = np.array(self._stack, np.int64)
        if len(np.unique(free)) != len(free):
            wrong.append("a block is on the free list twice")
        if self.counts.min() < 0:
            wrong.append(f"blocks {np.flatnonzero(self.counts < 0).tolist()} have negative counts")
        held = np.flatnonzero(self.counts[free])
        if held.size:
            wrong.append(f"blocks {free[held].tolist()} are free and referenced")
        counted = int(np.count_nonzero(self.counts))
        if counted + self.free != self.capacity:
            wrong.append(f"{self.free} free + {counted} referenced != {self.capacity} blocks")
        return wrong
