"""Which leaf goes first: the order in which the blocks of the tree are given up.

Knows which nodes are leaves, since when their ends are unused and whether they are held; nothing of
tokens or of how a leaf is cut. Time is a counter of releases, not seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from radixkv.nodes import Node

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class LruLeaves:
    """Leaves in the order of the last use of their *last* block; least recent first.

    Use is kept to the block, so touching a prefix refreshes what matched and no more: the rest of
    its edge still goes when its own time comes, and edges may be split and joined freely.

    An entry is one integer, time and slot, in a heap; what it says of the time may be too early,
    never too late, so a leaf may be used, held, lengthened and cut in its place, and the entry is
    corrected only when it comes up. One that then proves to be held to its end leaves the queue,
    and letting it go queues it again. Nothing is ever walked or sorted anew.

    Of several queues that stand in a line each promises not to begin before ``promised``, and says
    so by ``on_earlier`` when it has to break that.

    Invariant: a leaf whose end nobody holds is queued (``entry`` is in the heap, and not 0).
    """

    __slots__ = ("_heap", "_open", "_slots", "num_queued", "on_earlier", "promised")

    def __init__(self) -> None:
        self.num_queued = 0
        self.promised = -(1 << 80)
        self.on_earlier: Callable[[], None] | None = None
        self._heap: list[int] = []
        self._slots: list[Node | None] = []
        self._open: list[int] = []  # indices of _slots that hold None

    def add(self, leaf: Node) -> None:
        """Queue a leaf that does not queue yet."""
        if self._open:
            slot = self._open.pop()
            self._slots[slot] = leaf
        else:
            slot = len(self._slots)
            self._slots.append(leaf)
        leaf.entry = leaf.used << _SLOT_BITS | slot  # used is never 0, so neither is an entry
        self.num_queued += 1
        heapq.heappush(self._heap, leaf.entry)
        # Entries of discarded leaves leave when they come up; where nothing is ever evicted they
        # would pile up, so they are swept once they are the majority: O(1) each.
        if len(self._heap) > 2 * self.num_queued + 64:
            self._heap = [x.entry for x in self._slots if x is not None]
            heapq.heapify(self._heap)
        if leaf.entry < self.promised and self.on_earlier is not None:
            self.on_earlier()

    def discard(self, leaf: Node) -> None:
        """Forget a leaf that is about to be removed or given children, if it queues."""
        if leaf.entry:
            slot = leaf.entry & _SLOT_MASK
            self._slots[slot] = None
            self._open.append(slot)
            self.num_queued -= 1
            leaf.entry = 0

    def first(self) -> int | None:
        """Return what no entry of the queue lies before; None if there is none."""
        return self._heap[0] if self._heap else None

    def oldest(self) -> Node:
        """Return the leaf whose last block is the next to go; there is one that nobody holds."""
        leaf = self.peek()
        assert leaf is not None, "every leaf is held, and yet something was to be evicted"
        return leaf

    def peek(self) -> Node | None:
        """Return the leaf whose last block is the next to go; None if each is held to its end."""
        heap, slots = self._heap, self._slots
        while heap:
            entry = heap[0]
            leaf = slots[entry & _SLOT_MASK]
            if leaf is None or leaf.entry != entry:
                heapq.heappop(heap)
            elif leaf.locks and leaf.num_held() == len(leaf.blocks):
                heapq.heappop(heap)
                self.discard(leaf)
            elif leaf.used == entry >> _SLOT_BITS:
                return leaf
            else:
                leaf.entry = leaf.used << _SLOT_BITS | entry & _SLOT_MASK
                heapq.heapreplace(heap, leaf.entry)
        return None

    def check(self, leaves: list[Node]) -> list[str]:
        """Return each broken invariant in words, given all leaves of the tree. O(leaves)."""
        wrong = []
        entries = set(self._heap)
        for leaf in leaves:
            name = f"the leaf that ends in block {leaf.blocks[-1]}"
            if leaf.entry:
                if self._slots[leaf.entry & _SLOT_MASK] is not leaf or leaf.entry not in entries:
                    wrong.append(f"{name} has lost its place in line")
                if leaf.entry >> _SLOT_BITS > leaf.used:
                    wrong.append(f"{name} is older than its place says")
            elif leaf.num_held() < len(leaf.blocks):
                wrong.append(f"{name} can never be evicted")
        queued = sum(1 for leaf in leaves if leaf.entry)
        if queued != self.num_queued or len(self._slots) - len(self._open) != queued:
            wrong.append(f"{self.num_queued} leaves queue by count, {queued} by walk")
        return wrong
