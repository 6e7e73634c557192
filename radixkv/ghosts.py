"""What was evicted lately, to tell "evicted" from "never seen": runs of tokens that left the tree.

Knows nodes, in which path they were and when they went; nothing of blocks or of who asks. A
diagnosis only: nothing that is found here is ever used as KV, or shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.identity.paths import begin_path
from radixkv.nodes import Node, Root
from radixkv.runs import RECORD_BYTES, Edge, Noted, Path, Runs, Stretch
from radixkv.tree import RadixTree

_PLACES = 256  # ends of edges whose path's digest is kept, lest each child makes it anew

_Place: TypeAlias = "tuple[bytes, Path, Runs]"
"""The end of a node's edge, for as long as the first is the node's very key: the path to there."""


class Ghosts:
    """Runs of evicted tokens by tenant, bounded in bytes: the oldest is forgotten first.

    One record a run, however long: a leaf that is cut block by block, as decoding does, is one run
    that grows to the front. Its tokens are kept, so what was evicted is told to the token (but for
    less than its first block); the path before it is kept as a digest of 64 bits. To note a run is
    to look up its parent's path and to keep its key; the rest waits until somebody asks.
    """

    def __init__(
        self,
        tree: RadixTree,
        *,
        max_bytes: int = 1 << 20,
        max_total_bytes: int = 1 << 25,
    ) -> None:
        """Of what goes from ``tree``.

        Each tenant has ``max_bytes``, or an equal part of ``max_total_bytes`` if that is less, so
        none can silence another; a run takes 256 bytes and its tokens.
        """
        self._tree = tree
        self._stride = tree.stride
        self._max_bytes = self._limit = max_bytes
        self._max_total_bytes = max_total_bytes
        self._runs: dict[str | None, Runs] = {}
        self._places: dict[Node, _Place] = {}
        # The edge that was cut last, and where it is to be noted once it is not cut on.
        self._last: Edge | None = None
        self._noted: deque[Noted] = deque()

    @property
    def num_runs(self) -> int:
        """Runs remembered, of all tenants."""
        return sum(len(runs) for runs in self._runs.values()) + (self._last is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is remembered, of all tenants."""
        return sum(runs.num_bytes for runs in self._runs.values())

    # -- noting ------------------------------------------------------------------------------------

    def note(self, leaf: Node) -> None:
        """Note that ``leaf`` begins to lose its blocks, from the end: now, or a cut at a time.

        All of its tokens are noted: of those that are still resident nobody will ask.
        """
        tree = self._tree
        if self._last is not None:
            self._noted.append((self._last, tree.cut_when))
        parent = leaf.parent
        place = self._places.get(parent)  # type: ignore[arg-type]
        if place is None or place[0] is not parent.key:  # type: ignore[union-attr]
            place = self._find(parent)  # type: ignore[arg-type]
        key, runs = leaf.key, place[2]
        self._last = (place[1], key, leaf.start)
        self._noted = runs.noted
        tree.cut = b""
        tree.cut_when = tree.clock
        runs.num_bytes += len(key) + RECORD_BYTES
        if runs.num_bytes > self._limit:
            self._close()
            runs.trim(self._limit)

    def note_lost(self, identity: CacheIdentity, tokens: bytes) -> None:
        """Note that ``identity`` finds no more what it found without having it: a public prefix."""
        self._close()
        path, runs = begin_path(identity), self._of(identity.namespace.tenant)
        runs.noted.append((((path, path.intdigest()), tokens, 0), self._tree.clock))
        runs.num_bytes += len(tokens) + RECORD_BYTES
        if runs.num_bytes > self._limit:
            runs.trim(self._limit)

    def _close(self) -> None:
        """Note what was noted last as gone for good: if it is cut on, it is noted anew."""
        if self._last is not None:
            self._noted.append((self._last, self._tree.cut_when))
            self._last, self._tree.cut = None, b""

    def note_all(self, roots: Iterable[Root]) -> None:
        """Note that everything below ``roots`` is about to go; where it is too much, ends first."""
        room: dict[Runs, int] = {}
        for root in roots:
            nodes: list[Node] = [root]
            for node in nodes:
                runs = self._find(node)[2]
                left = room.get(runs, self._limit - self._limit // 16)
                for child in (node.children or {}).values():
                    left -= len(child.key) + RECORD_BYTES
                    if left > 0:
                        self.note(child)
                        nodes.append(child)
                room[runs] = left
        self._close()
        self._places.clear()

    def clear(self) -> None:
        """Forget all that was evicted."""
        self._last, self._tree.cut = None, b""
        self._places.clear()
        self._runs.clear()
        self._limit = self._max_bytes

    def forget(self, tenant: str | None) -> None:
        """Forget all that was evicted of ``tenant``."""
        self._close()
        if self._runs.pop(tenant, None) is not None:
            self._places.clear()

    def _of(self, tenant: str | None) -> Runs:
        """Return the runs of ``tenant``; with a new one the share of each may become less."""
        runs = self._runs.get(tenant)
        if runs is None:
            runs = self._runs[tenant] = Runs(self._stride)
            self._limit = min(self._max_bytes, self._max_total_bytes // len(self._runs))
            for each in self._runs.values():
                if each.num_bytes > self._limit:
                    each.trim(self._limit)
        return runs

    def _find(self, node: Node) -> _Place:
        """Return the end of ``node``'s edge. O(edges above whose places are not remembered)."""
        place = self._places.get(node)
        above: list[Node] = []
        while place is None or place[0] is not node.key:
            above.append(node)
            place = None
            if isinstance(node, Root):
                break
            assert node.parent is not None
            node = node.parent
            place = self._places.get(node)
        for node in reversed(above):
            if place is None:
                assert isinstance(node, Root)
                path, runs = begin_path(node.identity), self._of(node.identity.namespace.tenant)
                if node.border is not None:
                    path.update(node.border.tokens[: node.start * self._stride])
            else:
                path, runs = place[1][0].copy(), place[2]
                path.update(node.key)
            place = self._places[node] = (node.key, (path, path.intdigest()), runs)
            if len(self._places) > _PLACES:
                del self._places[next(iter(self._places))]
        assert place is not None
        return place

    # -- asking ------------------------------------------------------------------------------------

    def find(self, identity: CacheIdentity, tokens: bytes, resident: int) -> list[Stretch]:
        """Return the stretches of ``tokens`` that were resident lately, and follow on ``resident``.

        ``resident`` tokens are resident now; what was evicted may begin before their end, where
        part of it has come back. Each stretch begins where the one before it ends. O(places at
        which anything of this tenant was evicted, on paths no longer than this one).
        """
        self._close()
        runs = self._runs.get(identity.namespace.tenant)
        return [] if runs is None else runs.find(identity, tokens, resident)
