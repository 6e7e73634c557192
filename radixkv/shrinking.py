"""How blocks leave the tree: from the ends of its leaves, least recently used first.

Knows the tree and whose turn it is; nothing of tokens beyond their length. O(1) per block,
O(log leaves) per leaf.
"""

from __future__ import annotations

from array import array

from radixkv.accounts import Account
from radixkv.blocks import BlockIds
from radixkv.nodes import Node, Root
from radixkv.tokens import TOKEN_BYTES
from radixkv.tree import RadixTree


def take(tree: RadixTree, n: int, taker: Account) -> BlockIds:
    """Return ``n`` blocks of one reference each: free ones, then evicted ones.

    The caller has seen to it that there are enough that ``taker`` may have.
    """
    free = tree.pool.free
    if n <= free:
        return tree.pool.take(n)
    out = tree.pool.take(free)
    _evict_into(tree, out, n - free, taker)
    return out


def evict(tree: RadixTree, n: int, taker: Account) -> int:
    """Free up to ``n`` blocks that ``taker`` may have; return how many."""
    out = array("i")
    n = min(n, tree.accounts.evictable_by(taker, tree.evictable))
    _evict_into(tree, out, n, taker)
    return tree.pool.drop(out)


def _evict_into(tree: RadixTree, out: BlockIds, n: int, taker: Account) -> None:
    """Append ``n`` evicted blocks; the tree's reference to each becomes the caller's."""
    stride, many, watch, look = tree.stride, tree.many, tree.on_evict, tree.look_at_evicted
    victims, peek = tree.accounts.victims, taker.leaves.peek
    tree.num_blocks -= n
    tree.evictable -= n
    tree.num_evicted += n
    tree.version += 1
    if many:
        taker.caused += n
    while n:
        if many:
            account, node, most = victims.next(taker)
            blocks = node.blocks
            keep = len(blocks) - min(most, n)
        else:
            node = peek()  # type: ignore[assignment]
            blocks = node.blocks
            keep = len(blocks) - n
        if keep < 0:
            keep = 0
        # What was used later, or is held, begins the edge.
        if node.steps is not None and node.steps[0][0] - node.start > keep:
            keep = node.steps[0][0] - node.start
        if node.locks:
            held = node.num_held()
            if held > keep:
                keep = held
        if look is not None:
            look(node, keep)
        if node.key is tree.cut:
            tree.cut_when = tree.clock
        elif watch is not None:
            watch(node)
        if many:
            gone = len(blocks) - keep
            account.suffered += gone
            account.blocks -= gone
            account.evictable -= gone
            if account.bounded:
                tree.accounts.note(account)
        n -= len(blocks) - keep
        if keep:
            out += blocks[keep:]
            node.shorten(keep, stride)
            tree.cut = node.key
        else:
            out += blocks
            _remove(tree, node)


def _remove(tree: RadixTree, leaf: Node) -> None:
    """Take out a leaf, all of whose blocks go."""
    parent = leaf.parent
    assert parent is not None
    leaves = leaf.root.account.leaves
    leaves.discard(leaf)
    leaf.unlink(tree.stride)
    if len(leaf.key) < tree.stride:
        tree.num_unfilled -= (tree.stride - len(leaf.key)) // TOKEN_BYTES
    leaf.fade()
    tree.num_nodes -= 1
    if parent.children is None:
        if isinstance(parent, Root):
            drop_root(tree, parent)
        elif parent.num_held() < len(parent.blocks):
            leaves.add(parent)
    elif len(parent.children) == 1 and parent.blocks:
        tree.num_nodes -= parent.join(tree.stride)


def drop_root(tree: RadixTree, root: Root) -> None:
    """Forget a root that nothing is below."""
    if root.border is None:
        del tree.roots[root.identity]
    else:
        del root.border.mounts[root.identity]
        tree.num_mounts -= 1
    root.account.roots.discard(root)


def disown(tree: RadixTree, node: Node, depth: int) -> Node | None:
    """Give the last block of a path to the one who holds it, and return his hold on the rest.

    For when nothing is evictable, so that no path goes on from it.
    """
    node = node.at(depth)
    assert node.num_holding(depth) == 1 and node.end == depth and node.children is None
    if tree.on_evict is not None:
        tree.on_evict(node)
    tree.num_blocks -= 1
    tree.version += 1
    if tree.many:
        tree.accounts.count_blocks(node.root.account, -1)
    if len(node.blocks) > 1:
        node.shorten(len(node.blocks) - 1, tree.stride)
        return node
    parent = node.parent
    assert parent is not None
    # His hold on the parent is what the locked child has been.
    before: Node | None = parent
    if parent is parent.root and parent.root.border is not None:
        before = tree.step_out(parent.root)
    _remove(tree, node)
    return before


def prune(tree: RadixTree, root: Root) -> None:
    """Free what nobody holds of all below ``root``, a mount that was withdrawn.

    It counts as evicted, by whoever had declared public what comes before. O(nodes below it).
    """
    assert root.border is not None
    causer = tree.accounts.of(root.border.identity.namespace.tenant)
    nodes: list[Node] = [root]
    for node in nodes:
        nodes += (node.children or {}).values()
    account = root.account
    for node in reversed(nodes[1:]):  # children before parents
        held = node.num_held()
        gone = node.blocks[held:]
        if not gone or node.children:
            continue
        if tree.on_evict is not None:
            tree.on_evict(node)
        tree.num_blocks -= len(gone)
        tree.evictable -= len(gone)
        tree.num_evicted += len(gone)
        if tree.many:
            account.suffered += len(gone)
            causer.caused += len(gone)
            tree.accounts.count_blocks(account, -len(gone), -len(gone))
        tree.pool.drop(gone)
        if held:
            node.shorten(held, tree.stride)
        else:
            _remove(tree, node)
    tree.version += 1
