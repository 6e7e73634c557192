"""What was evicted lately, to tell "evicted" from "never seen": runs of tokens that left the tree.

Knows token bytes, in which path they were and when they went; nothing of blocks or of who asks. A
diagnosis only: nothing that is found here is ever used as KV, or shown.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.identity.paths import PathHash, begin_path
from radixkv.nodes import Node, Root
from radixkv.tokens import TOKEN_BYTES, common_bytes
from radixkv.tree import RadixTree

_RECORD = 256  # bytes that a run takes beside its tokens
_PLACES = 256  # ends of edges whose path's digest is kept, lest each child makes it anew


class Stretch(NamedTuple):
    """Tokens ``[start, end)`` of a query that were resident until ``when``, by the tree's clock."""

    start: int
    end: int
    when: int


_Run: TypeAlias = "tuple[int, bytes, int]"
"""Bytes of the path before it, tokens, when it went. Plain, as there is one for each eviction."""


_Noted: TypeAlias = "tuple[PathHash, int, bytes, int, int, int]"
"""State and digest of the path before an edge, its key, blocks kept of it, start (in blocks), when.

Plain tuples of what refers to nothing, as the next: the garbage collector does not look at them.
"""


class _Place(NamedTuple):
    """The end of a node's edge, for as long as ``key`` is the node's very key."""

    key: bytes
    path: PathHash  # of all tokens to there, to be copied and gone on with
    digest: int
    account: _Account


class _Account:
    """One tenant's runs, the one that went last at the end."""

    __slots__ = ("noted", "num_bytes", "places", "runs")

    def __init__(self) -> None:
        self.noted: deque[_Noted] = deque()  # and not filed yet
        # By the digest of the path before it, and its first block (all of it, if it is a tail).
        self.runs: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()
        self.num_bytes = 0  # of their tokens, of the keys that were noted, and _RECORD for each
        # (where a run starts, the bytes of its first block) -> how many do: where to look.
        self.places: dict[tuple[int, int], int] = {}

    def put(self, digest: int, first: bytes, run: _Run) -> _Run | None:
        """Remember a run; return one that began alike, if it had to go for it."""
        key = (digest, first)
        start, tokens, when = run
        old = self.runs.pop(key, None)
        if old is None:
            place = (start, len(first))
            self.places[place] = self.places.get(place, 0) + 1
        else:
            self.num_bytes -= len(old[1]) + _RECORD
            if old[1].startswith(tokens):  # what follows has not come back meanwhile
                run, old = (start, old[1], when), None
            elif tokens.startswith(old[1]):
                old = None
        self.runs[key] = run
        self.num_bytes += len(run[1]) + _RECORD
        return old

    def trim(self, max_bytes: int) -> None:
        """Forget what went first, until a sixteenth of ``max_bytes`` is free."""
        while self.num_bytes > max_bytes - max_bytes // 16:
            if not self.runs:
                self.num_bytes -= len(self.noted.popleft()[2]) + _RECORD
                continue
            (_, first), (start, tokens, _) = self.runs.popitem(last=False)
            self.num_bytes -= len(tokens) + _RECORD
            place = (start, len(first))
            left = self.places[place] - 1
            if left:
                self.places[place] = left
            else:
                del self.places[place]


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
        self._accounts: dict[str | None, _Account] = {}
        self._places: OrderedDict[Node, _Place] = OrderedDict()
        # What was noted last, of which leaf and to where it was cut: most likely it is cut on.
        self._noted: deque[_Noted] = deque()
        self._leaf: Node | None = None
        self._start = self._end = 0

    @property
    def num_runs(self) -> int:
        """Runs remembered, of all tenants."""
        return sum(len(account.noted) + len(account.runs) for account in self._accounts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of what is remembered, of all tenants."""
        return sum(account.num_bytes for account in self._accounts.values())

    # -- noting ------------------------------------------------------------------------------------

    def note(self, leaf: Node, keep: int) -> None:
        """Note that ``leaf`` is about to lose all its blocks but the first ``keep``."""
        start = leaf.start
        if self._leaf is leaf and self._end == start + len(leaf.blocks) and self._start == start:
            # It is cut further: of the same key less was kept.
            path, digest, key, _, _, _ = self._noted[-1]
            self._noted[-1] = (path, digest, key, keep, start, self._tree.clock)
            self._end = start + keep
            return
        parent = leaf.parent
        place = self._places.get(parent)  # type: ignore[arg-type]
        if place is None or place[0] is not parent.key:  # type: ignore[union-attr]
            place = self._place(parent)  # type: ignore[arg-type]
        _, path, digest, account = place
        key = leaf.key
        self._leaf, self._start, self._end = leaf, start, start + keep
        self._noted = account.noted
        self._noted.append((path, digest, key, keep, start, self._tree.clock))
        account.num_bytes += len(key) + _RECORD
        if account.num_bytes > self._limit:
            account.trim(self._limit)
            if not self._noted:
                self._leaf = None

    def note_all(self, roots: Iterable[Root]) -> None:
        """Note that everything below ``roots`` is about to go; where it is too much, ends first."""
        room: dict[int, int] = {}
        for root in roots:
            nodes: list[Node] = [root]
            for node in nodes:
                account = self._place(node).account
                left = room.get(id(account), self._limit - self._limit // 16)
                for child in (node.children or {}).values():
                    left -= len(child.key) + _RECORD
                    if left > 0:
                        self.note(child, 0)
                        nodes.append(child)
                room[id(account)] = left
        self._leaf = None
        self._places.clear()

    def clear(self) -> None:
        """Forget all that was evicted."""
        self._leaf = None
        self._places.clear()
        self._accounts.clear()
        self._limit = self._max_bytes

    def forget(self, tenant: str | None) -> None:
        """Forget all that was evicted of ``tenant``."""
        if self._accounts.pop(tenant, None) is not None:
            self._places.clear()
            self._leaf = None

    def _file(self, account: _Account) -> None:
        """File what was noted, now that somebody asks: most is forgotten before that."""
        self._leaf = None
        stride = self._stride
        for path, digest, key, keep, start, when in account.noted:
            account.num_bytes -= len(key) + _RECORD
            if keep:
                path = path.copy()
                path.update(key[: keep * stride])
                digest = path.intdigest()
                self._put(account, path, digest, start + keep, key[keep * stride :], when)
            else:
                self._put(account, path, digest, start, key, when)
        account.noted.clear()

    def _put(
        self,
        account: _Account,
        path: PathHash,
        digest: int,
        depth: int,
        tokens: bytes,
        when: int,
    ) -> None:
        """File a run that goes on from ``path``."""
        stride = self._stride
        run = (depth * stride, tokens, when)
        old = account.put(digest, tokens[:stride], run)
        if old is not None:
            self._part(path, account, old, run)

    def _account(self, tenant: str | None) -> _Account:
        """Return the account of ``tenant``; with a new one the share of each may become less."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            self._limit = min(self._max_bytes, self._max_total_bytes // len(self._accounts))
            for each in self._accounts.values():
                if each.num_bytes > self._limit:
                    each.trim(self._limit)
        return account

    def _part(self, path: PathHash, account: _Account, old: _Run, new: _Run) -> None:
        """Remember of ``old`` what ``new`` does not begin with: they part behind a first block."""
        stride, (start, tokens, when) = self._stride, old
        shared = common_bytes(tokens, 0, len(tokens), new[1])
        shared -= shared % stride
        path = path.copy()
        path.update(tokens[:shared])
        rest = (start + shared, tokens[shared:], when)
        other = account.put(path.intdigest(), rest[1][:stride], rest)
        if other is not None:
            self._part(path, account, other, rest)

    def _place(self, node: Node) -> _Place:
        """Return the end of ``node``'s edge. O(edges above whose places are not remembered)."""
        place = self._places.get(node)
        if place is not None and place.key is node.key:
            return place
        above: list[Node] = []
        while place is None or place.key is not node.key:
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
                path = begin_path(node.identity)
                if node.border is not None:
                    path.update(node.border.tokens[: node.start * self._stride])
                account = self._account(node.identity.namespace.tenant)
            else:
                path, account = place.path.copy(), place.account
                path.update(node.key)
            place = self._places[node] = _Place(node.key, path, path.intdigest(), account)
            if len(self._places) > _PLACES:
                self._places.popitem(last=False)
        assert place is not None
        return place

    # -- asking ------------------------------------------------------------------------------------

    def find(self, identity: CacheIdentity, tokens: bytes, resident: int) -> list[Stretch]:
        """Return the stretches of ``tokens`` that were resident lately, and follow on ``resident``.

        ``resident`` tokens are resident now; what was evicted may begin before their end, where
        part of it has come back. Each stretch begins where the one before it ends. O(places at
        which anything of this tenant was evicted, on paths no longer than this one).
        """
        account = self._accounts.get(identity.namespace.tenant)
        if account is None:
            return []
        self._file(account)
        path, at = begin_path(identity), 0
        digest = path.intdigest()
        found: list[Stretch] = []
        known = resident * TOKEN_BYTES
        size = len(tokens)
        for start, first in sorted(place for place in account.places if place[0] < size):
            if start > known:
                break  # nothing leads there
            if start > at:
                path.update(tokens[at:start])
                at, digest = start, path.intdigest()
            run = account.runs.get((digest, tokens[start : start + first]))
            if run is None:
                continue
            shared = common_bytes(tokens, start, size, run[1])
            end = start + shared - shared % TOKEN_BYTES
            if end > known:
                found.append(Stretch(known // TOKEN_BYTES, end // TOKEN_BYTES, run[2]))
                known = end
        return found
