"""The work lists of a decode step at sizes known beforehand, as a captured graph needs them.

Knows lists of ``triton_work`` and how to fill the rest of a launch with programs that do nothing;
numpy only. A graph's launches are as many programs as there is room for, whatever the step. Sizes
are powers of two, so that few graphs serve all lengths; a program without work costs about as much
as it takes to start one.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from radixkv.kernels.plan import Int32
from radixkv.kernels.triton_work import Work

NEVER = 1 << 30
"""The first key of a program that has none: behind every sequence."""


@dataclass(frozen=True, slots=True, order=True)
class Room:
    """How many lines each list of a step may have, whatever its window."""

    decode: int
    runs: int
    run_queries: int
    slots: int

    @classmethod
    def of(cls, works: Mapping[int | None, Work]) -> "Room":
        """Say how much room a step needs. One slot is kept for programs without work."""
        most = works.values()
        return cls(
            _at_least(max(len(w.decode) for w in most)),
            _at_least(max(len(w.runs) for w in most)),
            _at_least(max(len(w.run_queries) for w in most)),
            _at_least(max(w.num_slots for w in most) + 1),
        )

    def shapes(self, rows: int, windows: tuple[int | None, ...]) -> dict[Hashable, tuple[int, ...]]:
        """Name the lists of a step of ``rows`` sequences, by kind and window, with their shapes."""
        shapes: dict[Hashable, tuple[int, ...]] = {}
        for window in windows:
            shapes["decode", window] = (self.decode, 3)
            shapes["runs", window] = (self.runs, 6)
            shapes["run_queries", window] = (self.run_queries, 2)
            shapes["merge", window] = (rows, 3)
        return shapes

    def fill(self, works: Mapping[int | None, Work]) -> dict[Hashable, Int32]:
        """Give each list the length that its launch has.

        A program of ``decode`` without work begins behind every key, and says so in a slot of
        its own that nobody merges; one of ``runs`` has no queries. Every row is merged.
        """
        lists: dict[Hashable, Int32] = {}
        for window, work in works.items():
            nothing = np.array([0, NEVER, self.slots - 1], dtype=np.int32)
            lists["decode", window] = _filled(work.decode, self.decode, nothing)
            lists["runs", window] = _filled(work.runs, self.runs, 0)
            lists["run_queries", window] = _filled(work.run_queries, self.run_queries, 0)
            lists["merge", window] = work.merge
        return lists


def _filled(lines: Int32, length: int, rest: Int32 | int) -> Int32:
    full = np.empty((length, lines.shape[1]), dtype=np.int32)
    full[: len(lines)] = lines
    full[len(lines) :] = rest
    return full


def _at_least(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
