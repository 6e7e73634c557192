"""What was evicted lately, to tell "evicted" from "never seen": runs of tokens that left the tree.

Knows token bytes, in which path they were and when they went; nothing of blocks or of who asks. A
diagnosis only: nothing that is found here is ever used as KV, or shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.identity.paths import PathHash, begin_path
from radixkv.nodes import Node, Root
from radixkv.tokens import TOKEN_BYTES, common_bytes

_PLACES = 256  # ends of edges whose path's digest is kept, lest each child makes it anew


class Stretch(NamedTuple):
    """Tokens ``[start, end)`` of a query that were resident until ``when``, by the tree's clock."""

    start: int
    end: int
    when: int


_Run: TypeAlias = "tuple[int, bytes, int]"
"""Bytes of the path before it, tokens, when it went. Plain, as there is one for each eviction."""


class _Place(NamedTuple):
    """The end of a node's edge, for as long as ``key`` is the node's very key."""

    key: bytes
    path: PathHash  # of all tokens to there, to be copied and gone on with
    digest: int
    account: _Account


class _Account:
    """One tenant's runs, the one that went last at the end."""

    __slots__ = ("num_bytes", "places", "runs")

    def __init__(self) -> None:
        # By the digest of the path before it, and its first block (all of it, if it is a tail).
        self.runs: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()
        self.num_bytes = 0  # of their tokens
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
            self.num_bytes -= len(old[1])
            if old[1].startswith(tokens):  # what follows has not come back meanwhile
                run, old = (start, old[1], when), None
            elif tokens.startswith(old[1]):
                old = None
        self.runs[key] = run
        self.num_bytes += len(run[1])
        return old

    def drop_oldest(self) -> None:
        (_, first), (start, tokens, _) = self.runs.popitem(last=False)
        self.num_bytes -= len(tokens)
        place = (start, len(first))
        left = self.places[place] - 1
        if left:
            self.places[place] = left
        else:
            del self.places[place]


class Ghosts:
    """Runs of evicted tokens by tenant, bounded in number and bytes: the oldest is forgotten first.

    One record a run, however long: a leaf that is cut block by block, as decoding does, is one run
    that grows to the front. Its tokens are kept, so what was evicted is told to the token (but for
    less than its first block); the path before it is kept as a digest of 64 bits. To note a run
    costs the digest of one edge at most, and mostly a look-up of the parent's.
    """

    def __init__(
        self,
        stride: int,
        *,
        max_runs: int = 4096,
        max_bytes: int = 1 << 20,
        max_total_bytes: int = 1 << 25,
    ) -> None:
        """``stride``: bytes of a block's tokens. The first two limits are for each tenant."""
        self._stride = stride
        self._max_runs = max_runs
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._accounts: dict[str | None, _Account] = {}
        self._places: OrderedDict[Node, _Place] = OrderedDict()
        self._num_bytes = 0
        # The leaf that was cut last, if it may be cut further: to which depth and when, where its
        # edge begins, what that was and how much of it stayed; and what was cut off, last first.
        self._leaf: Node | None = None
        self._depth = self._when = self._kept = 0
        self._place_before: _Place | None = None
        self._key = b""
        self._pieces: list[bytes] = []

    @property
    def num_runs(self) -> int:
        """Runs remembered, of all tenants."""
        self._settle()
        return sum(len(account.runs) for account in self._accounts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens remembered, of all tenants."""
        self._settle()
        return self._num_bytes

    # -- noting ------------------------------------------------------------------------------------

    def note(self, leaf: Node, keep: int, when: int) -> None:
        """Note that ``leaf`` is about to lose all its blocks but the first ``keep``."""
        key, start, parent = leaf.key, leaf.start, leaf.parent
        last = self._leaf
        if last is not None and (last is not leaf or self._depth != start + len(leaf.blocks)):
            self._settle()
        place = self._places.get(parent)  # type: ignore[arg-type]
        if place is None or place[0] is not parent.key:  # type: ignore[union-attr]
            place = self._place(parent)  # type: ignore[arg-type]
        if keep:
            # It is likely to be cut again at once: the path to the cut is digested when it was not.
            kept = keep * self._stride
            self._pieces.append(key[kept:])
            self._leaf, self._depth, self._when = leaf, start + keep, when
            self._place_before, self._key, self._kept = place, key, kept
        else:
            self._pieces.append(key)
            self._leaf = None
            self._put(place, start, when)

    def note_all(self, roots: Iterable[Root], when: int) -> None:
        """Note that everything below ``roots`` is about to go; where it is too much, ends first."""
        self._settle()
        room: dict[int, int] = {}
        for root in roots:
            nodes: list[Node] = [root]
            for node in nodes:
                place = self._place(node)
                account = place.account
                left = room.get(id(account), self._max_runs)
                for child in list((node.children or {}).values())[:left]:
                    self._pieces.append(child.key)
                    self._put(place, child.start, when)
                    nodes.append(child)
                    left -= 1
                room[id(account)] = left
        self._places.clear()

    def clear(self) -> None:
        """Forget all that was evicted."""
        self._leaf = None
        self._pieces.clear()
        self._places.clear()
        self._accounts.clear()
        self._num_bytes = 0

    def forget(self, tenant: str | None) -> None:
        """Forget all that was evicted of ``tenant``."""
        self._settle()
        account = self._accounts.pop(tenant, None)
        if account is not None:
            self._num_bytes -= account.num_bytes
            self._places.clear()

    def _settle(self) -> None:
        """Put the run away that might have grown further."""
        if self._leaf is None:
            return
        self._leaf = None
        before = self._place_before
        assert before is not None
        path = before.path.copy()
        path.update(self._key[: self._kept])
        self._put(_Place(b"", path, path.intdigest(), before.account), self._depth, self._when)

    def _put(self, place: _Place, depth: int, when: int) -> None:
        """Remember the pieces as one run behind ``place``, and forget what is too much."""
        pieces, account, stride = self._pieces, place.account, self._stride
        tokens = pieces[0] if len(pieces) == 1 else b"".join(reversed(pieces))
        pieces.clear()
        before = account.num_bytes
        run = (depth * stride, tokens, when)
        old = account.put(place.digest, tokens[:stride], run)
        if old is not None:
            self._part(place.path, account, old, run)
        while len(account.runs) > self._max_runs or account.num_bytes > self._max_bytes:
            account.drop_oldest()
        self._num_bytes += account.num_bytes - before
        while self._num_bytes > self._max_total_bytes:
            # Whoever has more than his share gives, so that no tenant's noise silences another.
            share = self._max_total_bytes // len(self._accounts)
            if account.num_bytes <= share:
                account = max(self._accounts.values(), key=lambda other: other.num_bytes)
            before = account.num_bytes
            account.drop_oldest()
            self._num_bytes += account.num_bytes - before

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
                account = self._accounts.setdefault(node.identity.namespace.tenant, _Account())
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
        self._settle()
        account = self._accounts.get(identity.namespace.tenant)
        if account is None:
            return []
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
