"""Which of many sequences another one begins with, without a look at each of them.

Knows token bytes and what is kept under them; nothing of pins or trees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from radixkv.tokens import TOKEN_BYTES, common_bytes

V = TypeVar("V")


class Prefixes(Generic[V]):
    """Values by the sequences that they are kept under; several may be under one, by a name."""

    __slots__ = ("_order", "_size", "_values")

    def __init__(self) -> None:
        self._order: list[bytes] = []
        self._values: dict[bytes, dict[str, V]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, tokens: bytes, name: str, value: V) -> None:
        """Keep ``value`` under ``tokens``, and a name that is new there."""
        named = self._values.get(tokens)
        if named is None:
            named = self._values[tokens] = {}
            insort(self._order, tokens)
        named[name] = value
        self._size += 1

    def drop(self, tokens: bytes, name: str) -> None:
        """Keep it no more; KeyError if it is not there."""
        named = self._values[tokens]
        del named[name]
        self._size -= 1
        if not named:
            del self._values[tokens]
            del self._order[bisect_left(self._order, tokens)]

    def beginning(self, tokens: bytes) -> Iterator[V]:
        """Yield what is kept under sequences that ``tokens`` begins with, the longest first.

        Between a sequence and one that goes on from it, in sorted order, all go on from it. So if
        the last that is not behind ``tokens`` is no beginning of it, those that are one are
        beginnings of what both have in common, too. O(log sequences) memcmps for each that is
        yielded, and for each that branches off on the way to it.
        """
        order, end = self._order, len(tokens)
        while end >= 0:
            at = bisect_right(order, tokens[:end])
            if not at:
                return
            last = order[at - 1]
            if tokens.startswith(last):
                yield from self._values[last].values()
                end = len(last) - TOKEN_BYTES
            else:
                shared = common_bytes(tokens, 0, end, last)
                end = shared - shared % TOKEN_BYTES
