"""The nodes of a radix tree: edges, who uses how much of them and since when, splits and joins.

Knows token bytes, block ids and depths of paths; nothing of pools, sequences or who may share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.blocks import NO_BLOCKS, BlockIds
from radixkv.identity.identity import CacheIdentity
from radixkv.siblings import SortedKeys
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.accounts import Account
    from radixkv.public import PublicPrefix

# To lengthen or shorten an edge copies its key, so longer ones are made as chains: a look-up takes
# one step more per 16k tokens, and no append or eviction ever copies more than 64 KiB.
MAX_EDGE_BYTES = 1 << 16

# Time counts releases, from 1 on. What batch work used counts from UNUSED on instead: every time of
# it lies before every time of interactive work, and so it is given up before, without looking.
UNUSED = -(1 << 40)


class Node:
    """An edge and the node at its end: block ``blocks[i]`` holds the i-th block of ``key``.

        root --[p0 p1]--> A --[p2]--> B        path(B) = p0 p1 p2
                          +---[p3]--> C        path(C) = p0 p1 p3
                          +---[t]               a tail: fewer tokens than a block, always a leaf

    Blocks are whole but for tails, so edges differ in their first block and a child is found by
    one probe for it. A tail is never the beginning of a sibling: it would be of no use.

    *Depth* is blocks from the root: this edge's lie from ``start`` to ``end``. A *hold* is a path's
    user and is named by a node and the depth at which it ends, on that node's edge or above.
    Neither splits nor joins nor evictions make that name false: the lower part of a split stays the
    node it was, the lower of two that are joined too, and what is taken out still knows its parent.

        locks   holds that end on this edge, and children that have locks
        ends    depth -> holds that end there, before the end of the edge; the other holds, and
                whatever locks a child, hold all of it
        used    when a path to the end of the edge or beyond was last let go, but for those that
                only a child that is still there has seen: it tells when it goes
        steps   (depth, time) of later uses that ended before the end: depths fall, times rise
        root    whose path it is
    """

    __slots__ = (
        "blocks",
        "children",
        "ends",
        "entry",
        "key",
        "locks",
        "order",
        "parent",
        "root",
        "start",
        "steps",
        "used",
    )

    def __init__(self, key: bytes, blocks: BlockIds, parent: Node | None, start: int) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        if parent is not None:
            self.root: Root = parent.root
        self.start = start
        self.children: dict[bytes, Node] | None = None  # by the first block (or tail) of their keys
        # The same keys, once there were two; None where blocks are single tokens.
        self.order: SortedKeys | None = None
        self.entry = 0  # its place in the eviction order
        self.locks = 0
        self.ends: dict[int, int] | None = None
        self.used = UNUSED
        self.steps: list[tuple[int, int]] | None = None

    @property
    def end(self) -> int:
        """The depth of the node."""
        return self.start + len(self.blocks)

    def at(self, depth: int) -> Node:
        """Return the node on whose edge the path to us is at ``depth``, which is not 0."""
        node = self
        while depth <= node.start:
            assert node.parent is not None
            node = node.parent
        return node

    def above(self) -> Node:
        """Return the node on whose edge our own edge begins, whatever has become of our parent."""
        assert self.parent is not None
        return self.parent.at(self.start)

    # -- use ---------------------------------------------------------------------------------------

    def num_held(self) -> int:
        """Return how many blocks of this edge are held: they are its first ones."""
        if not self.locks:
            return 0
        if self.ends is None or self.locks > sum(self.ends.values()):
            return len(self.blocks)
        return max(self.ends) - self.start

    def num_holding(self, depth: int) -> int:
        """Return how many holds (or held children) reach the block before ``depth``."""
        if self.ends is None:
            return self.locks
        return self.locks - sum(n for end, n in self.ends.items() if end < depth)

    def touch(self, depth: int, now: int) -> None:
        """Note that a path that ends here, at ``depth``, was in use until ``now``, the latest."""
        if depth == self.start + len(self.blocks):
            self.used = now
            self.steps = None
            return
        steps = self.steps
        if steps is None:
            self.steps = [(depth, now)]
            return
        while steps and steps[-1][0] <= depth:
            steps.pop()
        steps.append((depth, now))

    def touch_by_any(self, depth: int, now: int) -> None:
        """As ``touch``, where ``now`` need not be the latest: no time falls."""
        stairs = [(self.end, self.used), *(self.steps or [])]
        if any(end >= depth and used >= now for end, used in stairs):
            return
        deeper = [stair for stair in stairs if stair[0] > depth]
        later = [stair for stair in stairs if stair[0] < depth and stair[1] > now]
        stairs = [*deeper, (depth, now), *later]
        self.used = stairs[0][1]
        self.steps = stairs[1:] or None

    def outlast(self, depth: int) -> None:
        """Keep apart, before our end moves on from ``depth``, what is known of the end as it is."""
        self.steps = [(depth, self.used), *(self.steps or [])]
        self.used = UNUSED

    def inherit(self, used: int) -> None:
        """Note what a child that goes knows: that our end was in use until ``used``."""
        if used > self.used:
            self.used = used
            if self.steps is not None:
                self.steps = [step for step in self.steps if step[1] > used] or None

    # -- shape -------------------------------------------------------------------------------------

    def adopt(self, child: Node, stride: int) -> None:
        """Hang ``child`` below, whose first block (or tail) no other child begins with."""
        first = child.key[:stride]
        children = self.children
        if children is None:
            self.children = {first: child}
            return
        if stride > TOKEN_BYTES:
            if self.order is None:
                self.order = SortedKeys(stride)
                for key in children:
                    self.order.add(key)
            self.order.add(first)
        children[first] = child

    def unlink(self, stride: int) -> None:
        """Take this leaf out of its parent, which then knows when it was used."""
        parent = self.parent
        assert parent is not None and parent.children is not None
        first = self.key[:stride]
        del parent.children[first]
        if not parent.children:
            parent.children = parent.order = None
        elif parent.order is not None:
            parent.order.remove(first)
        parent.inherit(self.steps[-1][1] if self.steps else self.used)

    def shorten(self, keep: int, stride: int) -> None:
        """Cut the blocks behind the first ``keep`` off this leaf; nobody holds them."""
        del self.blocks[keep:]
        self.key = self.key[: keep * stride]
        end = self.start + keep
        while self.steps is not None and self.steps[0][0] >= end:
            self.used = self.steps[0][1]
            self.steps = self.steps[1:] or None
        if self.ends is not None:
            self.ends.pop(end, None)
            self.ends = self.ends or None

    def split(self, at: int, stride: int) -> Node:
        """Cut this edge after ``at`` blocks; return the new upper node. ``self`` is the lower."""
        parent, depth = self.parent, self.start + at
        assert parent is not None and parent.children is not None
        cut = at * stride
        upper = Node(self.key[:cut], self.blocks[:at], parent, self.start)
        parent.children[self.key[:stride]] = upper
        self.key, self.blocks, self.start = self.key[cut:], self.blocks[at:], depth
        upper.adopt(self, stride)
        self.parent = upper
        if self.ends is not None:
            ends = {end: n for end, n in self.ends.items() if end <= depth}
            self.ends = {end: n for end, n in self.ends.items() if end > depth} or None
            upper.locks = sum(ends.values())
            self.locks -= upper.locks
            ends.pop(depth, None)
            upper.ends = ends or None
        if self.locks:
            upper.locks += 1
        if self.steps is not None:
            for step in self.steps:
                if step[0] == depth:
                    upper.used = step[1]
            upper.steps = [step for step in self.steps if step[0] < depth] or None
            self.steps = [step for step in self.steps if step[0] > depth] or None
        return upper

    def join(self, stride: int) -> bool:
        """Join this node with its only child, which then stands for both, and return True.

        Unless a hold ends here, the child is a tail or the edge would be too long: then do nothing.
        """
        assert self.children is not None and self.parent is not None
        (child,) = self.children.values()
        if self.locks != (child.locks > 0) or len(child.key) < stride:
            return False
        if len(self.key) + len(child.key) > MAX_EDGE_BYTES:
            return False
        steps = child.steps or []
        for step in [(child.start, self.used), *(self.steps or [])]:
            if step[1] > (steps[-1][1] if steps else child.used):
                steps.append(step)
        child.steps = steps or None
        child.key = self.key + child.key
        child.blocks = self.blocks + child.blocks
        child.start = self.start
        child.parent = self.parent
        assert child.parent.children is not None
        child.parent.children[child.key[:stride]] = child
        self.fade()
        return True

    def fade(self) -> None:
        """Be no node of the tree any more, but for those whose hold leads past us to our parent."""
        self.key, self.blocks, self.children, self.order = b"", NO_BLOCKS, None, None


class Root(Node):
    """The beginning of every path of one identity; has no blocks, and nothing locks it.

    Or of every path that goes on from a public prefix, its ``border``: a *mount*. That begins at
    the depth to which the prefix fills whole blocks. Whatever locks a child locks it, and while it
    is locked it holds those blocks; ``parent`` is then the node, or one below, on which they end.
    """

    __slots__ = ("account", "border", "identity")

    def __init__(
        self, identity: CacheIdentity, account: Account, border: PublicPrefix | None = None
    ) -> None:
        super().__init__(b"", NO_BLOCKS, None, 0 if border is None else border.num_whole)
        self.root = self
        self.identity = identity
        self.account = account
        self.border = border
