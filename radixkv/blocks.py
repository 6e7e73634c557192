"""The pool of KV blocks: which ids are free, and how many hold each of the others.

Knows block ids and reference counts; nothing of tokens, trees or tensors.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import OutOfBlocks

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""Ids as numpy indexes with them; int32 would be cast on each use, at five times the cost."""


class BlockCopy(NamedTuple):
    """Copy the first ``num_valid`` tokens of block ``source`` to block ``target``, all layers."""

    source: int
    target: int
    num_valid: int


class BlockPool:
    """Counts references to ``capacity`` blocks; a block with none is free.

    Conservation law, true between any two calls: ``free + referenced == capacity``.
    Every operation is O(blocks moved), in C.
    """

    __slots__ = ("_stack", "capacity", "counts", "free")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool has {capacity} blocks; wanted at least 1")
        self.capacity = capacity
        self.counts: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.free = capacity
        # The free ids are _stack[:free]. Taken and given in reverse, so that a fresh pool, and one
        # that gets back what it handed out, deals consecutive ids: contiguous memory on the device.
        self._stack: npt.NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    @property
    def referenced(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - self.free

    def take(self, n: int) -> BlockIds:
        """Return ``n`` free blocks with one reference each, or raise OutOfBlocks and take none."""
        left = self.free - n
        if left < 0:
            raise OutOfBlocks(n, self.free, 0)
        ids = self._stack[left : self.free][::-1].astype(np.int64)
        self.counts[ids] = 1
        self.free = left
        return ids

    def share(self, ids: BlockIds) -> None:
        """Add a reference to each of ``ids`` (distinct, each referenced already)."""
        counts = self.counts[ids]
        if not counts.all():
            raise ValueError(f"shared a free block: {ids[counts == 0].tolist()}")
        self.counts[ids] = counts + 1

    def drop(self, ids: BlockIds) -> int:
        """Take one reference from each of ``ids`` (distinct); return how many became free.

        A block without references is refused (ValueError), and then nothing is changed.
        """
        counts = self.counts[ids] - 1
        if (counts < 0).any():
            raise ValueError(f"gave back a free block: {ids[counts < 0].tolist()}")
        self.counts[ids] = counts
        gone = ids[counts == 0]
        if gone.size:
            self.put_back(gone)
        return int(gone.size)

    def put_back(self, ids: BlockIds) -> None:
        """Put blocks on the free list whose count the caller has just brought to 0."""
        end = self.free + len(ids)
        self._stack[self.free : end] = ids[::-1]
        self.free = end

    def take_one(self) -> int:
        """Return one free block with one reference; there is one."""
        self.free -= 1
        block: int = self._stack.item(self.free)
        self.counts[block] = 1
        return block

    def put_back_one(self, block: int) -> None:
        """Put a block on the free list whose count the caller has just brought to 0."""
        self._stack[self.free] = block
        self.free += 1

    def check(self) -> list[str]:
        """Return each broken invariant in words. O(capacity)."""
        wrong = []
        free = self._stack[: self.free]
        if not 0 <= self.free <= self.capacity:
            return [f"{self.free} blocks are free of {self.capacity}"]
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
