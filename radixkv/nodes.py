"""The shape of a radix tree: edges, how they are found, split, joined and taken out.

Knows token bytes and block ids; nothing of references, ages or who may share.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.siblings import SortedKeys
from radixkv.tokens import TOKEN_BYTES, common_bytes

# To lengthen or shorten an edge copies its key, so longer ones are made as chains: a look-up takes
# one step more per 16k tokens, and no append or eviction ever copies more than 64 KiB.
MAX_EDGE_BYTES = 1 << 16


# Results on the path of every request are plain tuples: a class would cost more than the match.

Match: TypeAlias = "tuple[list[array[int]], int, int | None, int, Node | None]"
"""What is resident of a query: runs, num_whole, source, num_valid, node.

runs       the ids of its whole blocks, edge by edge; num_whole of them in all
source     the block that begins as the query then goes on, or None
num_valid  tokens of it that agree; 0 if source is None
node       the node that ends with the last whole block, or None if none does
"""
NOTHING: Match = ([], 0, None, 0, None)


class Node:
    """An edge and the node at its end: block ``blocks[i]`` holds the i-th block of ``key``.

        root --[p0 p1]--> A --[p2]--> B        path(B) = p0 p1 p2
                          +---[p3]--> C        path(C) = p0 p1 p3
                          +---[t]               a tail: fewer tokens than a block, always a leaf

    Blocks are whole but for tails, so edges differ in their first block and a child is found by
    one probe for it. A tail is never the beginning of a sibling: it would be of no use.
    """

    __slots__ = ("blocks", "children", "entry", "key", "order", "parent")

    def __init__(self, key: bytes, blocks: array[int], parent: Node | None) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Node] | None = None  # by the first block (or tail) of their keys
        self.order: SortedKeys | None = None  # the same keys; None where blocks are single tokens
        self.entry = 0  # its place in the eviction order

    def adopt(self, child: Node, stride: int) -> None:
        """Hang ``child`` below, whose first block (or tail) no other child begins with."""
        first = child.key[:stride]
        if self.children is None:
            self.children = {}
        if self.order is None and stride > TOKEN_BYTES:
            self.order = SortedKeys(stride)
        self.children[first] = child
        if self.order is not None:
            self.order.add(first)
        child.parent = self

    def split(self, at: int, stride: int) -> Node:
        """Cut this edge after ``at`` blocks; return the new upper node. ``self`` is the lower."""
        assert self.parent is not None and self.parent.children is not None
        cut = at * stride
        upper = Node(self.key[:cut], self.blocks[:at], self.parent)
        self.parent.children[self.key[:stride]] = upper
        self.key, self.blocks = self.key[cut:], self.blocks[at:]
        upper.adopt(self, stride)
        return upper

    def unlink(self, stride: int) -> None:
        """Take this leaf out, and leave its parent as it then is."""
        assert self.parent is not None and self.parent.children is not None
        first = self.key[:stride]
        del self.parent.children[first]
        if self.parent.order is not None:
            self.parent.order.remove(first)
        self.parent, self.blocks, self.key = None, array("q"), b""

    def join(self, stride: int) -> bool:
        """Join this node with its only child, which then stands for both, and return True.

        Unless the child is a tail or the edge would be too long: then do nothing.
        """
        assert self.children is not None and self.parent is not None
        (child,) = self.children.values()
        if len(child.key) < stride or len(self.key) + len(child.key) > MAX_EDGE_BYTES:
            return False
        child.key = self.key + child.key
        child.blocks = self.blocks + child.blocks
        child.parent = self.parent
        assert child.parent.children is not None
        child.parent.children[child.key[:stride]] = child
        self.parent, self.blocks, self.key, self.children = None, array("q"), b"", None
        return True


class Root(Node):
    """The beginning of every path of one identity; has no blocks."""

    __slots__ = ("identity",)

    def __init__(self, identity: CacheIdentity) -> None:
        super().__init__(b"", array("q"), None)
        self.identity = identity


def match(node: Node, tokens: bytes, limit: int, stride: int) -> Match:
    """Return the longest prefix of ``tokens[:limit]`` (bytes) below a root. Reads only.

    O(edges on the path) steps, each one dictionary probe and one memcmp.
    """
    whole = limit - limit % stride
    runs: list[array[int]] = []
    at = 0
    while node.children:
        if at < whole:
            child = node.children.get(tokens[at : at + stride])
            if child is not None:
                key = child.key
                after = at + len(key)
                if after <= limit and tokens.startswith(key, at):
                    runs.append(child.blocks)
                    at = after
                    node = child
                    continue
                shared = common_bytes(tokens, at, limit, key)
                num_blocks, rest = divmod(shared, stride)
                runs.append(child.blocks[:num_blocks])
                num_whole = at // stride + num_blocks
                if rest < TOKEN_BYTES:
                    return runs, num_whole, None, 0, None
                return runs, num_whole, child.blocks[num_blocks], rest // TOKEN_BYTES, None
        if at < limit and node.order is not None:
            source, num_valid = _overlap(node, tokens[at : min(at + stride, limit)])
            return runs, at // stride, source, num_valid, node
        break
    return runs, at // stride, None, 0, node


def _overlap(node: Node, query: bytes) -> tuple[int | None, int]:
    """Return the block below ``node`` that shares most tokens with ``query``, and how many.

    The keys are sorted, so it is one of the two that ``query`` would lie between.
    """
    assert node.order is not None and node.children is not None
    best, most = None, TOKEN_BYTES - 1
    begins = query[:TOKEN_BYTES]
    for key in node.order.around(query):
        if key is not None and key.startswith(begins):
            shared = common_bytes(query, 0, len(query), key)
            if shared > most:
                best, most = key, shared
    if best is None:
        return None, 0
    return node.children[best].blocks[0], most // TOKEN_BYTES
