"""The keys of one node's children in order, for finding the one that shares most with a query.

Knows byte strings; nothing of what they stand for.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class SortedKeys:
    """Distinct byte strings, sorted; add, remove and neighbours cost O(log n) and a short memmove.

    Kept in runs of at most ``_FULL`` keys: one list would move megabytes for a root with 100,000
    children.

    Invariant: no run is empty, runs and the keys in them ascend, ``_lasts[i]`` ends ``_runs[i]``.
    """

    __slots__ = ("_full_length", "_lasts", "_runs", "num_short")

    _FULL = 512

    def __init__(self, full_length: int) -> None:
        self._full_length = full_length
        self.num_short = 0  # keys of fewer than full_length bytes
        self._runs: list[list[bytes]] = []
        self._lasts: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Put ``key`` in its place; it is not there yet."""
        if len(key) < self._full_length:
            self.num_short += 1
        if not self._runs:
            self._runs.append([key])
            self._lasts.append(key)
            return
        at = self._run_of(key)
        run = self._runs[at]
        insort(run, key)
        self._lasts[at] = run[-1]
        if len(run) > self._FULL:
            half = len(run) // 2
            self._runs[at : at + 1] = [run[:half], run[half:]]
            self._lasts[at : at + 1] = [run[half - 1], run[-1]]

    def remove(self, key: bytes) -> None:
        """Take ``key`` out; it is there."""
        if len(key) < self._full_length:
            self.num_short -= 1
        at = self._run_of(key)
        run = self._runs[at]
        del run[bisect_left(run, key)]
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at], self._lasts[at]

    def around(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """Return the greatest key below ``key`` and the least key not below it."""
        if not self._runs:
            return None, None
        at = self._run_of(key)
        run = self._runs[at]
        i = bisect_left(run, key)
        after = run[i] if i < len(run) else None
        if i:
            return run[i - 1], after
        return (self._lasts[at - 1] if at else None), after

    def _run_of(self, key: bytes) -> int:
        """Return the place of the run that ``key`` is or would be in; there is one."""
        num = len(self._lasts)
        return 0 if num == 1 else min(bisect_left(self._lasts, key), num - 1)

    def keys(self) -> list[bytes]:
        """Return all keys in order. O(n)."""
        return [key for run in self._runs for key in run]

    def check(self) -> list[str]:
        """Return each broken invariant in words. O(n)."""
        keys = self.keys()
        wrong = []
        if any(a >= b for a, b in zip(keys, keys[1:], strict=False)):
            wrong.append("sibling keys are out of order")
        if self.num_short != sum(len(key) < self._full_length for key in keys):
            wrong.append("the short sibling keys are counted wrongly")
        if any(not run for run in self._runs) or self._lasts != [r[-1] for r in self._runs if r]:
            wrong.append("the index of the sibling keys is stale")
        return wrong
