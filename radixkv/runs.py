"""Runs of tokens that were evicted, of one tenant: where each began, and what of a query they are.

Knows token bytes and digests of the paths before them; nothing of nodes, or of other tenants.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple, TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.identity.paths import PathHash, begin_path
from radixkv.tokens import TOKEN_BYTES, common_bytes

RECORD_BYTES = 256
"""What a run takes beside its tokens."""


class Stretch(NamedTuple):
    """Tokens ``[start, end)`` of a query that were resident until ``when``, by the tree's clock."""

    start: int
    end: int
    when: int


_Run: TypeAlias = "tuple[int, bytes, int]"
"""Bytes of the path before it, tokens, when it went. Plain, as there is one for each eviction."""

Path: TypeAlias = "tuple[PathHash, int]"
"""State and digest of all tokens before an edge; the state is to be copied and gone on with."""
Edge: TypeAlias = "tuple[Path, bytes, int]"
"""The path before an edge, its key and its start (in blocks)."""
Noted: TypeAlias = "tuple[Edge, int]"
"""An edge that began to go, and when it was cut last.

Plain tuples of what refers to nothing, as runs: the garbage collector does not look at them.
"""


class Runs:
    """The runs of one tenant, the one that went last at the end.

    ``noted`` are those that nobody has asked for yet: they are filed when somebody does.
    """

    __slots__ = ("_places", "_runs", "_stride", "noted", "num_bytes")

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self.noted: deque[Noted] = deque()  # and not filed yet
        # By the digest of the path before it, and its first block (all of it, if it is a tail).
        self._runs: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()
        self.num_bytes = 0  # of tokens, of the keys that were noted, and RECORD_BYTES for each
        # (where a run starts, the bytes of its first block) -> how many do: where to look.
        self._places: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.noted) + len(self._runs)

    def trim(self, max_bytes: int) -> None:
        """Forget what went first, until a sixteenth of ``max_bytes`` is free, or all is."""
        excess = before = self.num_bytes - (max_bytes - max_bytes // 16)
        while excess > 0 and self._runs:
            (_, first), (start, tokens, _) = self._runs.popitem(last=False)
            excess -= len(tokens) + RECORD_BYTES
            place = (start, len(first))
            left = self._places[place] - 1
            if left:
                self._places[place] = left
            else:
                del self._places[place]
        noted = self.noted
        while excess > 0 and noted:
            (_, key, _), _ = noted.popleft()
            excess -= len(key) + RECORD_BYTES
        self.num_bytes -= before - excess

    def find(self, identity: CacheIdentity, tokens: bytes, resident: int) -> list[Stretch]:
        """Return the stretches of ``tokens`` that were resident lately; see Ghosts.find."""
        self._file()
        path, at = begin_path(identity), 0
        digest = path.intdigest()
        found: list[Stretch] = []
        known = resident * TOKEN_BYTES
        size = len(tokens)
        for start, first in sorted(place for place in self._places if place[0] < size):
            if start > known:
                break  # nothing leads there
            if start > at:
                path.update(tokens[at:start])
                at, digest = start, path.intdigest()
            run = self._runs.get((digest, tokens[start : start + first]))
            if run is None:
                continue
            shared = common_bytes(tokens, start, size, run[1])
            end = start + shared - shared % TOKEN_BYTES
            if end > known:
                found.append(Stretch(known // TOKEN_BYTES, end // TOKEN_BYTES, run[2]))
                known = end
        return found

    def _file(self) -> None:
        """File what was noted, now that somebody asks: most is forgotten before that."""
        for ((path, digest), key, start), when in self.noted:
            self.num_bytes -= len(key) + RECORD_BYTES
            self._put(path, digest, (start * self._stride, key, when))
        self.noted.clear()

    def _put(self, path: PathHash, digest: int, run: _Run) -> None:
        """File a run that goes on from ``path``; of one that begins alike keep the rest."""
        start, tokens, when = run
        first = tokens[: self._stride]
        key = (digest, first)
        old = self._runs.pop(key, None)
        if old is None:
            place = (start, len(first))
            self._places[place] = self._places.get(place, 0) + 1
        else:
            self.num_bytes -= len(old[1]) + RECORD_BYTES
            if old[1].startswith(tokens):  # what follows has not come back meanwhile
                run, old = (start, old[1], when), None
            elif tokens.startswith(old[1]):
                old = None
        self._runs[key] = run
        self.num_bytes += len(run[1]) + RECORD_BYTES
        if old is not None:
            self._part(path, old, run)

    def _part(self, path: PathHash, old: _Run, new: _Run) -> None:
        """Remember of ``old`` what ``new`` does not begin with: they part behind a first block."""
        stride, (start, tokens, when) = self._stride, old
        shared = common_bytes(tokens, 0, len(tokens), new[1])
        shared -= shared % stride
        path = path.copy()
        path.update(tokens[:shared])
        self._put(path, path.intdigest(), (start + shared, tokens[shared:], when))
