"""How paths enter the tree: blocks of equal tokens are kept once, edges part where tokens differ.

Knows the tree, token bytes and block ids; nothing of the sequences they come from. Whoever lets a
path grow holds it: the hold is named by a node and a depth, None and 0 for none, and is moved
along. Where he holds nothing of the path's own tree yet, it goes on from a ``root``: that of an
identity, or a mount, if he holds all that comes before that.
"""

from __future__ import annotations

from array import array

from radixkv.blocks import BlockIds
from radixkv.nodes import MAX_EDGE_BYTES, Node, Root
from radixkv.tokens import TOKEN_BYTES, common_bytes
from radixkv.tree import RadixTree


def follow(
    tree: RadixTree,
    held: Node | None,
    start: int,
    tokens: bytes,
    ids: BlockIds,
    stop: int,
    root: Root | None = None,
) -> tuple[Node | None, int]:
    """Find which of the whole blocks ``ids[start:stop]`` others have put in, and hold those.

    ``ids`` is pointed at the resident blocks in place, and its own, of one reference each, are let
    go. Returns the hold that takes the place of ``held`` and ``start``.
    """
    stride = tree.stride
    begin = held.at(start) if held is not None else None
    node = root or begin
    assert node is not None
    offset = start - node.start
    at, end = start * stride, stop * stride
    resident: BlockIds | None = None
    while at < end:
        if offset < len(node.blocks):
            key = node.key[offset * stride :]
        else:
            child = node.children.get(tokens[at : at + stride]) if node.children else None
            if child is None:
                break
            node, offset, key = child, 0, child.key
        if len(key) <= end - at and tokens.startswith(key, at):
            shared = len(key)
        else:
            shared = common_bytes(tokens, at, end, key)
            shared -= shared % stride
        at += shared
        found = node.blocks[offset : offset + shared // stride]
        offset += len(found)
        resident = found if resident is None else resident + found
        if offset < len(node.blocks):
            break
    if not resident:
        return begin, start
    depth = start + len(resident)
    own = ids[start:depth]
    ids[start:depth] = resident
    tree.hold(node, depth)
    if begin is not None:
        tree.let_go(begin, start)
    tree.pool.drop(own)
    tree.num_deduplicated += len(own)
    return node, depth


def extend(
    tree: RadixTree,
    held: Node | None,
    depth: int,
    key: bytes,
    blocks: BlockIds,
    root: Root | None = None,
    batch: bool = False,
) -> Node:
    """Let the path go on with ``key``, which nothing resident goes on with; return its end.

    The caller's reference to each of ``blocks`` becomes the tree's. ``batch``: he will release them
    as batch work.
    """
    node = root or (held.at(depth) if held is not None else None)
    assert node is not None
    stride = tree.stride
    if depth - node.start < len(node.blocks):
        node = node.split(depth - node.start, stride)
        tree.num_nodes += 1
    elif node.children is not None:
        _supersede(tree, node, key)
    tree.num_blocks += len(blocks)
    if tree.many:
        account = node.root.account
        account.published += len(blocks)
        account.blocks += len(blocks)
        if account.bounded:
            tree.accounts.note(account)
    tree.num_published += len(blocks)
    if tree.look_at_published is not None:
        tree.look_at_published(key, blocks)
        tree.look_at_published = None
    tree.version += 1
    if node.children is None and node.blocks:
        if len(key) >= stride and len(node.key) + len(key) <= MAX_EDGE_BYTES:
            others = node.locks - 1
            if node.ends is not None:
                others -= sum(node.ends.values())
            if others:  # theirs was the whole edge, and is no more
                node.ends = {**(node.ends or {}), depth: others}
            if batch and node.used > 0:  # which is not so of what comes behind
                node.outlast(depth)
                node.root.account.leaves.discard(node)
            node.key += key
            node.blocks.extend(blocks)
            return node
        node.root.account.leaves.discard(node)
    # The caller's hold on ``node`` becomes that of the locked child.
    if root is not None and root.border is not None:
        tree.step_in(root, held)
    step = max(MAX_EDGE_BYTES // stride, 1)
    for at in range(0, len(blocks), step):
        part = blocks if len(blocks) <= step else blocks[at : at + step]
        child = Node(key[at * stride : (at + step) * stride], part, node, depth + at)
        child.locks = 1
        node.adopt(child, stride)
        node = child
        tree.num_nodes += 1
    return node


def add_tail(
    tree: RadixTree,
    held: Node | None,
    depth: int,
    tail: bytes,
    block: int,
    root: Root | None = None,
    batch: bool = False,
) -> Node | None:
    """Let the path go on with the tokens of a partial block, and return its end.

    Does nothing, and returns None, where a resident block begins with the same tokens.
    """
    node = root or (held.at(depth) if held is not None else None)
    assert node is not None
    offset = depth - node.start
    if offset < len(node.blocks):
        if node.key.startswith(tail, offset * tree.stride):
            return None
    elif node.children is not None:
        if node.order is None:
            (after,) = node.children
        else:
            after = node.order.around(tail)[1] or b""
        if after.startswith(tail):
            return None
    tree.num_unfilled += (tree.stride - len(tail)) // TOKEN_BYTES
    return extend(tree, held, depth, tail, array("i", [block]), root, batch)


def _supersede(tree: RadixTree, node: Node, key: bytes) -> None:
    """Take out the tail below ``node`` that ``key`` begins with, if there is one."""
    assert node.children is not None
    if node.order is None:
        if len(node.children) > 1:
            return  # blocks are single tokens
        (first,) = node.children
    elif node.order.num_short:
        first = node.order.around(key[: tree.stride])[0] or b""
    else:
        return
    if not 0 < len(first) < tree.stride or not key.startswith(first):
        return
    tail = node.children[first]
    account = tail.root.account
    account.leaves.discard(tail)
    tail.unlink(tree.stride)
    tree.num_unfilled -= (tree.stride - len(tail.key)) // TOKEN_BYTES
    tail.key = b""  # what is held of it lives on without the tree
    tree.num_nodes -= 1
    tree.num_blocks -= 1
    if tail.locks and node is node.root and node.root.border is not None:
        # What is held of it is not behind a mount any more, but behind what comes before that.
        before = tail.parent = tree.step_out(node.root)
        if before is not None:
            tail.root = before.root
    if not tail.locks:
        tree.evictable -= 1
        tree.pool.drop(tail.blocks)
    elif tree.orphans is not None:
        tree.orphans.append(tail)
    if tree.many:
        tree.accounts.count_blocks(account, -1, 0 if tail.locks else -1)
