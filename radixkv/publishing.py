"""How a sequence's blocks come to be shared: into which tree they go, and when they may.

Knows tables, the public prefix that one may begin with, and whom forks have to wait for; nothing of
how a tree grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.growing import add_tail, extend, follow
from radixkv.nodes import Node, Root
from radixkv.shrinking import drop_root
from radixkv.tokens import encode

if TYPE_CHECKING:
    from radixkv.public import PublicPrefix
    from radixkv.table import BlockTable


def publish(table: BlockTable, tokens: bytes, tail: bool) -> None:
    """Put the blocks of ``table`` into the tree that are not there yet; see BlockTable.publish.

    Of a public prefix the last tokens are put in as well when the table ends with them: they are
    in a block that will be private, and others are to find them too.
    """
    cache, num_tokens, border = table._cache, table.num_tokens, table._terms.border
    if table.released:
        raise ValueError("this table was released")
    if not cache.enabled:
        return
    if type(tokens) is not bytes:
        tokens = encode(tokens)
    if len(tokens) < 4 * num_tokens:
        raise ValueError(f"{len(tokens) // 4} tokens given; KV exists for {num_tokens}")
    num_whole, rest = divmod(num_tokens, cache.block_size)
    if border is not None:
        if border.withdrawn or not _keeps_to(border.tokens, tokens):
            return
        tail = tail or num_tokens == border.num_tokens
    start = table.num_published
    if num_whole > start and (start >= table._num_in or table._take_back(start)):
        if border is None:
            root = None if start else cache.tree.root(table.identity)
            _put(table, tokens, num_whole, root)
        else:
            _put_both(table, tokens, num_whole, border)
    if tail and rest and table.num_published == num_whole:
        _put_tail(table, tokens[num_whole * cache.tree.stride : 4 * num_tokens])


def _keeps_to(prefix: bytes, tokens: bytes) -> bool:
    """Tell whether a sequence has the prefix that it began with, as far as it goes.

    One that was truncated before its border may have gone elsewhere: that is nobody's business.
    """
    return tokens.startswith(prefix) or (len(tokens) < len(prefix) and prefix.startswith(tokens))


def _put_both(table: BlockTable, tokens: bytes, stop: int, border: PublicPrefix) -> None:
    """Put our whole blocks up to ``stop`` in: those before the border, then those behind it."""
    start, end = table.num_published, border.num_whole
    if start < end:
        _put(table, tokens, min(stop, end), _root(table, start, private=False))
        if table.num_published < end or stop == end:
            return
    _put(table, tokens, stop, _root(table, table.num_published, private=True))


def _put(table: BlockTable, tokens: bytes, stop: int, root: Root | None) -> None:
    """Put our whole blocks up to ``stop`` into one tree; below ``root`` if we hold none there."""
    tree, ids, start = table._cache.tree, table._ids, table.num_published
    node, depth = follow(tree, table._node, start, tokens, ids, stop, root)
    if table._forks is not None:
        table._moved |= depth > start
        stop = _ready(table, depth, stop)
    if depth < stop:
        key = tokens[depth * tree.stride : stop * tree.stride]
        node = extend(
            tree,
            node,
            depth,
            key,
            ids[depth:stop],
            root if depth == start else None,
            table._terms.batch,
        )
    elif root is not None and root.children is None:
        drop_root(tree, root)  # made in vain
    if node is not None:
        table.num_published = stop
        _sink(table, node, stop)


def _put_tail(table: BlockTable, tail: bytes) -> None:
    at, border = table.num_published, table._terms.border
    if table._sources or table._sources_in:
        return
    if at < table._num_in and (table._is_in(at, len(tail)) or not table._take_back(at)):
        return
    if table._forks is None or _ready(table, at, at + 1) > at:
        private = border is None or table.num_tokens > border.num_tokens
        root, block = _root(table, at, private), table._ids[at]
        end = add_tail(table._cache.tree, table._node, at, tail, block, root, table._terms.batch)
        if end is not None:
            _sink(table, end, at + 1)


def _root(table: BlockTable, at: int, private: bool) -> Root | None:
    """Return the root below which block ``at`` goes; None if we hold what is before it there."""
    tree, border = table._cache.tree, table._terms.border
    if border is None:
        return None if at else tree.root(table.identity)
    if private:
        return tree.mount(table.identity, border) if at == border.num_whole else None
    return None if at else tree.root(border.identity)


def _ready(table: BlockTable, start: int, stop: int) -> int:
    """Return to where our blocks from ``start`` on may enter the tree, for all our forks."""
    for at in range(start, stop):
        block = table._ids[at]
        if block in table._cache._copies:
            return at
        if table._moved and table._cache.pool.references(block) > 1:
            return at  # a fork has it without what is resident before it
    return stop


def _sink(table: BlockTable, node: Node, depth: int) -> None:
    """Note that our hold ends at ``depth`` now, and let our forks hold the same."""
    table._node, table._depth, table._num_in = node, depth, depth
    if table._forks is None:
        return
    for fork in table._forks:
        if fork is not table and fork._hold_with(table):
            whole = fork.num_tokens // table._cache.block_size
            fork.num_published = min(fork._num_in, table.num_published, whole)
