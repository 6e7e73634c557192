"""Which leaf goes first: the order in which the blocks of the tree are given up.

Knows when each block was last let go and which nodes are leaves; nothing of tokens or of how a
leaf is cut. Time is a counter of releases, not seconds.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from radixkv.blocks import BlockPool

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class Leaf(Protocol):
    """What the order needs of a node: its blocks, and a place to note where it queues."""

    blocks: array[int]
    entry: int


N = TypeVar("N", bound=Leaf)


class LruLeaves(Generic[N]):
    """Leaves in the order of the last use of their *last* block; least recent first.

    Use is kept per block, so touching a prefix refreshes what matched and no more: the rest of its
    edge still goes when its own time comes, and edges may be split and joined freely.

    Every leaf queues. An entry is one integer, time and slot, in a heap; what it says of the time
    may be too early, never too late, so a leaf may be used, lengthened and cut in its place, and
    the entry is corrected only when it comes up. A leaf that then proves to be held is *parked*
    under its last block's id, and letting that block go queues it again. Nothing is ever walked or
    sorted anew.

    Invariant: each leaf is either queued (``entry`` is in the heap) or parked (``entry == 0``).
    """

    __slots__ = ("_counts", "_heap", "_open", "_parked", "_slots", "clock", "num_queued", "used")

    def __init__(self, pool: BlockPool) -> None:
        self._counts = pool.counts
        # From 1, so that no entry is 0, which says that a leaf does not queue.
        self.used: npt.NDArray[np.int64] = np.ones(pool.capacity, np.int64)
        self.clock = 1
        self.num_queued = 0
        self._heap: list[int] = []
        self._slots: list[N | None] = []
        self._open: list[int] = []  # indices of _slots that hold None
        self._parked: dict[int, N] = {}

    def add_held(self, leaf: N) -> None:
        """Take in a leaf whose last block somebody holds; when he lets go, it will be used now."""
        self._queue(leaf, self.clock)

    def add_idle(self, leaf: N) -> None:
        """Take in a node that has become a leaf, held or not."""
        self._queue(leaf, self.used.item(leaf.blocks[-1]))

    def discard(self, leaf: N) -> None:
        """Forget a leaf that is about to be removed, lengthened while parked, or given children."""
        if leaf.entry:
            slot = leaf.entry & _SLOT_MASK
            self._slots[slot] = None
            self._open.append(slot)
            self.num_queued -= 1
            leaf.entry = 0
        elif self._parked.get(leaf.blocks[-1]) is leaf:
            del self._parked[leaf.blocks[-1]]

    def wake(self, block: int) -> None:
        """Queue the leaf parked at ``block``, if one is: nobody holds it any more."""
        leaf = self._parked.pop(block, None)
        if leaf is not None:
            self._queue(leaf, self.used.item(block))

    def oldest(self) -> N:
        """Return the leaf whose last block is the next to go; there is one that nobody holds."""
        heap, slots, counts, used = self._heap, self._slots, self._counts, self.used
        while heap:
            entry = heap[0]
            leaf = slots[entry & _SLOT_MASK]
            if leaf is None or leaf.entry != entry:
                heapq.heappop(heap)
                continue
            last = leaf.blocks[-1]
            if counts.item(last) > 1:
                heapq.heappop(heap)
                self._park(leaf)
                continue
            time = used.item(last)
            if time == entry >> _SLOT_BITS:
                return leaf
            leaf.entry = time << _SLOT_BITS | entry & _SLOT_MASK
            heapq.heapreplace(heap, leaf.entry)
        raise AssertionError("every leaf is held, and yet something was to be evicted")

    def park_all(self) -> None:
        """Park the leaves that still queue though they are held; call when every one is held."""
        for leaf in self._slots:
            if leaf is not None:
                self._park(leaf)

    def _park(self, leaf: N) -> None:
        self.discard(leaf)
        self._parked[leaf.blocks[-1]] = leaf

    def parked_at(self, block: int) -> N | None:
        """Return the leaf that ends in ``block`` and is held, if it has come up already."""
        return self._parked.get(block)

    def check(self, leaves: list[N]) -> list[str]:
        """Return each broken invariant in words, given all leaves of the tree. O(leaves)."""
        wrong = []
        entries = set(self._heap)
        parked = 0
        for leaf in leaves:
            last = leaf.blocks[-1]
            if leaf.entry:
                slot = leaf.entry & _SLOT_MASK
                if self._slots[slot] is not leaf or leaf.entry not in entries:
                    wrong.append(f"the leaf that ends in block {last} has lost its place in line")
                if leaf.entry >> _SLOT_BITS > self.used[last] and self._counts[last] == 1:
                    wrong.append(f"the leaf that ends in block {last} is older than its place says")
                if self._parked.get(last) is leaf:
                    wrong.append(f"the leaf that ends in block {last} is queued and parked")
            elif self._parked.get(last) is not leaf:
                wrong.append(f"the leaf that ends in block {last} can never be evicted")
            elif self._counts[last] <= 1:
                wrong.append(f"the leaf that ends in block {last} is parked but not held")
            else:
                parked += 1
        queued = sum(1 for leaf in leaves if leaf.entry)
        if queued != self.num_queued or len(self._slots) - len(self._open) != queued:
            wrong.append(f"{self.num_queued} leaves queue by count, {queued} by walk")
        if parked != len(self._parked):
            wrong.append(f"{len(self._parked)} leaves are parked by count, {parked} by walk")
        return wrong

    def _queue(self, leaf: N, time: int) -> None:
        if self._open:
            slot = self._open.pop()
            self._slots[slot] = leaf
        else:
            slot = len(self._slots)
            self._slots.append(leaf)
        leaf.entry = time << _SLOT_BITS | slot
        self.num_queued += 1
        heapq.heappush(self._heap, leaf.entry)
        # Entries of discarded leaves leave when they come up; where nothing is ever evicted they
        # would pile up, so they are swept once they are the majority: O(1) each.
        if len(self._heap) > 2 * self.num_queued + 64:
            self._heap = [x.entry for x in self._slots if x is not None]
            heapq.heapify(self._heap)
