"""Find stop strings in a text that comes in pieces; knows characters, nothing of tokens.

The stop string that is complete first wins; of several that end at the same character, the longest.
That does not depend on how the text is cut into pieces, and no look-ahead is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string found; ``start`` and ``end`` are places in the whole text."""

    start: int
    end: int
    stop: str


class StopMatcher:
    """Knuth, Morris and Pratt's automaton, one for each stop string: O(1) a character amortised.

    ``_state[i]`` is the length of the longest head of stop string ``i``, not all of it, that the
    text ends with.
    """

    __slots__ = ("_falls", "_first", "_length", "_state", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._falls = [_falls(stop) for stop in stops]
        self._first = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")
        self._state = [0] * len(stops)
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may yet become part of a stop string."""
        return max(self._state)

    def feed(self, text: str, *, armed: bool) -> Match | None:
        """Read on, and return the first match; what is complete while not ``armed`` is none.

        Nothing may be fed after a match.
        """
        start = 0
        if not self.held:  # nothing can match before the first letter of some stop string
            found = self._first.search(text)
            start = found.start() if found else len(text)
        state, stops = self._state, self._stops
        for at in range(start, len(text)):
            char, longest = text[at], -1
            for i, stop in enumerate(stops):
                falls, length = self._falls[i], state[i]
                while length and stop[length] != char:
                    length = falls[length - 1]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    length = falls[length - 1]
                    if longest < 0 or len(stop) > len(stops[longest]):
                        longest = i
                state[i] = length
            if longest >= 0 and armed:
                end = self._length + at + 1
                return Match(end - len(stops[longest]), end, stops[longest])
        self._length += len(text)
        return None


@lru_cache(maxsize=64)
def _falls(stop: str) -> tuple[int, ...]:
    """Return, for each head of ``stop``, the length of the longest proper head it ends with."""
    falls, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = falls[length - 1]
        if stop[length] == char:
            length += 1
        falls.append(length)
    return tuple(falls)
