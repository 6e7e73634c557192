"""Proof that a tree, its pool and its users agree, or words for where they do not.

Reads everything and changes nothing. Never raises on what it finds: a fault in the books is to be
reported, not to take a server down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from radixkv.accounts import Account
from radixkv.holder import Holder
from radixkv.nodes import UNUSED, Node
from radixkv.tree import RadixTree

Ends = dict[Node, Counter[int]]
"""Node -> depth -> holds that end there."""


def check(
    tree: RadixTree, users: Iterable[Holder], counted: Mapping[str, int] | None = None
) -> list[str]:
    """Return each broken invariant in words, given all who hold blocks of the tree or pool.

    ``counted`` are sums that the numbers of all accounts have to make, by name.
    """
    try:
        users = list(users)
        nodes = _walk(tree)
        ends, superseded = _ends(tree, users)
        return [
            *tree.pool.check(),
            *_check_shape(tree, nodes),
            *_check_holds(tree, nodes, ends),
            *_check_times(tree, nodes),
            *_check_references(tree, nodes, users, superseded),
            *_check_accounts(tree, nodes, counted or {}),
        ]
    except Exception as e:  # the walk itself tripped over what is broken
        return [f"the books cannot be read: {e!r}"]


def _walk(tree: RadixTree) -> list[Node]:
    """Return every node, roots too, parents before children."""
    nodes: list[Node] = [root for account in tree.accounts for root in account.roots]
    for node in nodes:
        nodes += (node.children or {}).values()
    return nodes


def _ends(tree: RadixTree, users: list[Holder]) -> tuple[Ends, set[Node]]:
    """Return where holds end, and the superseded tails, which hold what is before them.

    As locked mounts do.
    """
    ends: Ends = {}
    for account in tree.accounts:
        for root in account.roots:
            if root.parent is not None:
                ends.setdefault(root.parent.at(root.start), Counter())[root.start] += 1
    superseded: set[Node] = set()
    for user in users:
        if user._node is not None:
            node = user._node.at(user._depth)
            ends.setdefault(node, Counter())[user._depth] += 1
            if not node.key:
                superseded.add(node)
    for tail in superseded:
        if tail.start:
            ends.setdefault(tail.above(), Counter())[tail.start] += 1
    return ends, superseded


def _check_shape(tree: RadixTree, nodes: list[Node]) -> list[str]:
    wrong: list[str] = []
    wrong += _check_roots(tree)
    for node in nodes:
        for key, child in (node.children or {}).items():
            if child.parent is not node or child.key[: tree.stride] != key:
                wrong.append(f"a child of {_name(node)} is filed under the wrong key or parent")
            if child.start != node.end:
                wrong.append(f"a child of {_name(node)} begins at a depth that is not its end")
        wrong += _check_siblings(tree, node)
    nodes = [node for node in nodes if node.root is not node]
    for node in nodes:
        tail = 0 < len(node.key) < tree.stride
        if tail and (len(node.blocks) != 1 or node.children or len(node.key) % 4):
            wrong.append(f"{_name(node)} is a tail with blocks or children behind it")
        if not node.blocks or (not tail and len(node.key) != len(node.blocks) * tree.stride):
            size = f"{len(node.blocks)} blocks, {len(node.key)} bytes of key"
            wrong.append(f"{_name(node)} has {size}")
    if len(nodes) != tree.num_nodes:
        wrong.append(f"{tree.num_nodes} nodes by count, {len(nodes)} by walk")
    unfilled = sum(len(node.blocks) * tree.stride - len(node.key) for node in nodes) // 4
    if unfilled != tree.num_unfilled:
        wrong.append(f"{tree.num_unfilled} places of tails are empty by count, {unfilled} by walk")
    num_blocks = sum(len(node.blocks) for node in nodes)
    if num_blocks != tree.num_blocks:
        wrong.append(f"{tree.num_blocks} blocks in the tree by count, {num_blocks} by walk")
    return wrong


def _check_roots(tree: RadixTree) -> list[str]:
    """Check who files which root, what is a mount, and that a held one holds what is before it."""
    wrong = []
    num_mounts = 0
    for account in tree.accounts:
        for root in account.roots:
            border, home = root.border, tree.roots
            if border is not None:
                num_mounts += 1
                home = border.mounts
            locked = sum(1 for child in (root.children or {}).values() if child.locks)
            if home.get(root.identity) is not root or root.account is not account:
                wrong.append(f"the root of {root.identity} is filed wrongly")
            if root.blocks or root.key or not root.children or root.root is not root:
                wrong.append(f"the root of {root.identity} is not one, or has nothing below it")
            if root.start != (0 if border is None else border.num_whole):
                wrong.append(f"the root of {root.identity} begins at {root.start}")
            if root.locks != (0 if border is None else locked):
                wrong.append(f"the root of {root.identity} has {root.locks} locks for {locked}")
            if (root.parent is not None) != (root.locks > 0 and root.start > 0):
                wrong.append(f"the root of {root.identity} holds what is before it, or fails to")
            public = tree.roots.get(border.identity) if border is not None else None
            if root.parent is not None and root.parent.at(root.start).root is not public:
                wrong.append(f"the mount of {root.identity} holds another's path")
    if num_mounts != tree.num_mounts:
        wrong.append(f"{tree.num_mounts} mounts by count, {num_mounts} by walk")
    plain = sum(1 for account in tree.accounts for root in account.roots if root.border is None)
    if plain != len(tree.roots):
        wrong.append(f"the tree has {len(tree.roots)} roots, its accounts {plain}")
    return wrong


def _check_siblings(tree: RadixTree, node: Node) -> list[str]:
    keys = sorted(node.children or {})
    wrong = []
    if node.order is not None:
        wrong += node.order.check()
        if node.order.keys() != keys:
            wrong.append(f"the sorted children of {_name(node)} are not its children")
    elif len(keys) > 1 and tree.block_size > 1:
        wrong.append(f"the children of {_name(node)} are not sorted")
    if any(b.startswith(a) for a, b in zip(keys, keys[1:], strict=False)):
        wrong.append(f"a tail below {_name(node)} is the beginning of its sibling")
    return wrong


def _check_holds(tree: RadixTree, nodes: list[Node], ends: Ends) -> list[str]:
    """Compare locks, the depths they reach and the count of what they do not reach."""
    wrong = []
    evictable = 0
    for node in reversed(nodes):  # children before parents
        if not node.blocks:
            continue
        here = ends.get(node, Counter())
        inside = {depth: n for depth, n in here.items() if depth != node.end}
        locked_children = sum(1 for child in (node.children or {}).values() if child.locks)
        if node.locks != here.total() + locked_children:
            wrong.append(
                f"{_name(node)} has {node.locks} locks for {here.total()} holds "
                f"and {locked_children} locked children"
            )
        if (node.ends or {}) != inside or node.ends == {}:
            wrong.append(f"{_name(node)} knows of holds to {node.ends}, and they are to {inside}")
        if any(not node.start < depth <= node.end for depth in here):
            wrong.append(f"a hold on {_name(node)} ends at none of its depths")
        evictable += len(node.blocks) - node.num_held()
    for node in ends.keys() - set(nodes):
        if node.key or node.locks != ends[node].total() or len(node.blocks) != 1:
            wrong.append(f"{_name(node)} is held {ends[node].total()} times and not in the tree")
    if evictable != tree.evictable:
        wrong.append(f"{tree.evictable} blocks are evictable by count, {evictable} by walk")
    return wrong


def _check_times(tree: RadixTree, nodes: list[Node]) -> list[str]:
    """Check that later uses end before earlier ones, all on the edge and none in the future."""
    wrong = []
    for node in nodes:
        steps = [(node.end, node.used), *(node.steps or [])]
        depths, times = zip(*steps, strict=True)
        if node.steps == [] or depths[-1] <= node.start and node.steps:
            wrong.append(f"a use of {_name(node)} ended before it begins")
        if sorted(set(depths), reverse=True) != [*depths] or sorted(set(times)) != [*times]:
            wrong.append(f"the uses of {_name(node)} are out of order: {steps}")
        if not all(0 <= t - (UNUSED if t < 0 else 0) <= tree.clock for t in times):
            wrong.append(f"{_name(node)} was used at a time that never was: {steps}")
    return wrong


def _check_accounts(tree: RadixTree, nodes: list[Node], counted: Mapping[str, int]) -> list[str]:
    """Compare what each account says with its nodes, and the sums of all with the tree's."""
    blocks: Counter[Account] = Counter()
    evictable: Counter[Account] = Counter()
    leaves: dict[Account, list[Node]] = {account: [] for account in tree.accounts}
    wrong = []
    for node in nodes:
        account = node.root.account
        if node.root is not node and node.parent is not None and node.parent.root is not node.root:
            wrong.append(f"{_name(node)} and its parent have two roots")
        blocks[account] += len(node.blocks)
        evictable[account] += len(node.blocks) - node.num_held()
        if node.blocks and not node.children:
            leaves.setdefault(account, []).append(node)
    wrong += tree.accounts.check(blocks, evictable)
    for account, its_leaves in leaves.items():
        wrong += account.leaves.check(its_leaves)
    for name, whole in {**counted, "blocks": tree.num_blocks, "evictable": tree.evictable}.items():
        parts = sum(getattr(account, name) for account in tree.accounts)
        if parts != whole:
            wrong.append(f"{name} of all accounts make {parts}, and {whole} in all")
    return wrong


def _check_references(
    tree: RadixTree, nodes: list[Node], users: list[Holder], superseded: set[Node]
) -> list[str]:
    """Compare the pool's counts with who owns what: the tree once, tables once each."""
    through_tree = Counter(block for node in [*nodes, *superseded] for block in node.blocks)
    directly = Counter(block for user in users for block in user.own_references())
    twice = [block for block, n in through_tree.items() if n > 1]
    wrong = [f"blocks {twice} are in the tree twice"] if twice else []
    for block in sorted(through_tree.keys() & directly.keys()):
        wrong.append(f"block {block} is in the tree and a table's own")
    expected = np.zeros(tree.pool.capacity, np.int32)
    for block, times in (through_tree + directly).items():
        expected[block] = times
    for block in np.flatnonzero(expected != tree.pool.counts).tolist():
        counted = tree.pool.counts[block]
        wrong.append(f"block {block} is counted {counted} times and held {expected[block]} times")
    return wrong


def _name(node: Node) -> str:
    return f"the node of blocks {node.blocks[:3].tolist()}..." if node.blocks else "a root"
