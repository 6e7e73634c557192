"""Proof that a tree, its pool and its users agree, or words for where they do not.

Reads everything and changes nothing. Never raises on what it finds: a fault in the books is to be
reported, not to take a server down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from radixkv.nodes import Node
from radixkv.tree import RadixTree


def check(tree: RadixTree, held: Iterable[int]) -> list[str]:
    """Return each broken invariant in words. ``held`` names a block once per user's reference."""
    try:
        return [*tree.pool.check(), *_check_nodes(tree), *_check_references(tree, Counter(held))]
    except Exception as e:  # the walk itself tripped over what is broken
        return [f"the books cannot be read: {e!r}"]


def _check_nodes(tree: RadixTree) -> list[str]:
    wrong: list[str] = []
    leaves: list[Node] = []
    num_nodes = 0
    blocks: list[int] = []
    for identity, root in tree.roots.items():
        if root.identity != identity or root.blocks or root.key or not root.children:
            wrong.append(f"the root of {identity} is not one, or has nothing below it")
        pending: list[Node] = [root]
        while pending:
            node = pending.pop()
            if node is not root:
                num_nodes += 1
                blocks += node.blocks
                wrong += _check_node(tree, node)
                if not node.children:
                    leaves.append(node)
            for key, child in (node.children or {}).items():
                if child.parent is not node or child.key[: tree.stride] != key:
                    wrong.append(f"a child of {_name(node)} is filed under the wrong key or parent")
                pending.append(child)
            wrong += _check_siblings(tree, node)
    if num_nodes != tree.num_nodes:
        wrong.append(f"{tree.num_nodes} nodes by count, {num_nodes} by walk")
    if len(set(blocks)) != len(blocks):
        wrong.append("a block is in the tree twice")
    if len(blocks) != tree.num_blocks:
        wrong.append(f"{tree.num_blocks} blocks in the tree by count, {len(blocks)} by walk")
    if sorted(blocks) != np.flatnonzero(tree.cached).tolist():
        wrong.append("the marks of the blocks in the tree are not those of the tree")
    return wrong + tree.leaves.check(leaves)


def _check_node(tree: RadixTree, node: Node) -> list[str]:
    """Check one edge: its length, and that use and holds do not grow along the path."""
    wrong = []
    tail = 0 < len(node.key) < tree.stride
    if tail and (len(node.blocks) != 1 or node.children or len(node.key) % 4):
        wrong.append(f"{_name(node)} is a tail with blocks or children behind it")
    if not node.blocks or (not tail and len(node.key) != len(node.blocks) * tree.stride):
        wrong.append(f"{_name(node)} has {len(node.blocks)} blocks, {len(node.key)} bytes of key")
    ids = np.array(node.blocks, np.int64)
    if node.parent is not None and node.parent.blocks:
        ids = np.concatenate([[node.parent.blocks[-1]], ids])
    counts, used = tree.pool.counts[ids], tree.leaves.used[ids]
    if (counts[1:] > counts[:-1]).any():
        wrong.append(f"{_name(node)} has a block that is held though the one before it is not")
    if ((used[1:] > used[:-1]) & (counts[:-1] == 1)).any():
        wrong.append(f"{_name(node)} has a block that is to outlive the one before it")
    return wrong


def _check_siblings(tree: RadixTree, node: Node) -> list[str]:
    keys = sorted(node.children or {})
    wrong = []
    if node.order is not None:
        wrong += node.order.check()
        if node.order.keys() != keys:
            wrong.append(f"the sorted children of {_name(node)} are not its children")
    elif keys and tree.block_size > 1:
        wrong.append(f"the children of {_name(node)} are not sorted")
    if any(b.startswith(a) for a, b in zip(keys, keys[1:], strict=False)):
        wrong.append(f"a tail below {_name(node)} is the beginning of its sibling")
    return wrong


def _check_references(tree: RadixTree, held: Counter[int]) -> list[str]:
    """Compare the pool's counts with the tree's references and the users'."""
    expected = tree.cached.astype(np.int32)
    for block, times in held.items():
        expected[block] += times
    wrong = [
        f"block {block} is counted {tree.pool.counts[block]} times and held {expected[block]} times"
        for block in np.flatnonzero(expected != tree.pool.counts).tolist()
    ]
    evictable = int(np.count_nonzero(tree.cached & (tree.pool.counts == 1)))
    if evictable != tree.evictable:
        wrong.append(f"{tree.evictable} blocks are evictable by count, {evictable} by walk")
    return wrong


def _name(node: Node) -> str:
    return f"the node of blocks {node.blocks[:3].tolist()}..." if node.blocks else "a root"
