"""What of a sequence is resident: the longest common prefix with any path, to the token.

Reads only. Knows nodes and token bytes; nothing of who asks or who holds.
"""

from __future__ import annotations

from typing import TypeAlias

from radixkv.blocks import BlockIds
from radixkv.nodes import Node
from radixkv.tokens import TOKEN_BYTES, common_bytes

# The result is on the path of every request, so it is a plain tuple: a class would cost as much
# as the match.

Match: TypeAlias = "tuple[list[BlockIds], int, int | None, int, Node | None]"
"""What is resident of a query: runs, num_whole, source, num_valid, node.

runs       the ids of its whole blocks, edge by edge; num_whole of them in all
source     the block that begins as the query then goes on, or None
num_valid  tokens of it that agree; 0 if source is None
node       the node on whose edge the last of these blocks lies; None if there are none
"""
NOTHING: Match = ([], 0, None, 0, None)


def match(node: Node, tokens: bytes, limit: int, stride: int) -> Match:
    """Return the longest prefix of ``tokens[:limit]`` (bytes) below a root.

    Of what comes before a mount the length is counted in, the runs are not. O(edges on the path)
    steps, each one dictionary probe and one memcmp.
    """
    whole = limit - limit % stride
    runs: list[BlockIds] = []
    begin = at = node.start * stride
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
                    return runs, num_whole, None, 0, child
                return runs, num_whole, child.blocks[num_blocks], rest // TOKEN_BYTES, child
        if at < limit and stride > TOKEN_BYTES:
            child, num_valid = _overlap(node, tokens[at : min(at + stride, limit)])
            if child is not None:
                return runs, at // stride, child.blocks[0], num_valid, child
        break
    return runs, at // stride, None, 0, node if at > begin else None


def _overlap(node: Node, query: bytes) -> tuple[Node | None, int]:
    """Return the child of ``node`` whose first block shares most tokens with ``query``: how many.

    The keys are sorted, so it is one of the two that ``query`` would lie between.
    """
    children = node.children
    assert children is not None
    around = children if node.order is None else node.order.around(query)
    best, most = None, 0
    begins, size, number = query[:TOKEN_BYTES], len(query), int.from_bytes(query)
    for key in around:
        if key is not None and key.startswith(begins):
            # The first bit in which two numbers of equal length differ says how much they share.
            if len(key) >= size:
                differ = number ^ int.from_bytes(key[:size])
                shared = size - (differ.bit_length() + 7 >> 3)
            else:
                differ = number >> 8 * (size - len(key)) ^ int.from_bytes(key)
                shared = len(key) - (differ.bit_length() + 7 >> 3)
            if shared > most:
                best, most = key, shared
    if best is None:
        return None, 0
    return children[best], most // TOKEN_BYTES
