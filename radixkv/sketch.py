"""Distributions of durations in bounded memory, and what time it was when a counter stood so.

Knows numbers and seconds; nothing of what lasted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_ACCURACY = 0.05  # of a quantile, relative
_GAMMA = (1 + _ACCURACY) / (1 - _ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_LEAST_S = 1e-3  # what is no longer counts as 0
_MOST_S = 1e9

_MARKS = 512
_SPACING_S = 0.01


class Sketch:
    """A distribution of seconds: quantiles within 5 %, from 280 counters at most.

    They are of buckets that grow exponentially; what is no longer than a millisecond counts as 0.
    """

    __slots__ = ("_counts", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._counts: dict[int, int] = {}  # i -> durations in (gamma^(i-1), gamma^i] milliseconds

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration, ``times`` over."""
        if seconds <= _LEAST_S:
            seconds, at = 0.0, 0
        else:
            at = math.ceil(math.log(min(seconds, _MOST_S) / _LEAST_S) / _LOG_GAMMA)
        self._counts[at] = self._counts.get(at, 0) + times
        self.count += times
        self.sum += seconds * times

    def quantile(self, q: float) -> float | None:
        """Return the seconds that a share ``q`` of the durations do not exceed; None if none."""
        if not 0 <= q <= 1:
            raise ValueError(f"the quantile is {q}; wanted 0 to 1")
        rank = q * (self.count - 1)
        for at in sorted(self._counts):
            rank -= self._counts[at]
            if rank < 0:
                # Of all that the bucket may hold, no other value has as small an error.
                return _LEAST_S * _GAMMA**at * (1 - _ACCURACY) if at else 0.0
        return None

    def cumulative(self, bounds_s: Sequence[float]) -> tuple[int, ...]:
        """Return how many durations do not exceed each of the bounds, themselves within 5 %."""
        buckets = sorted(self._counts)
        sums = [0]
        for at in buckets:
            sums.append(sums[-1] + self._counts[at])
        last = [round(math.log(max(b, _LEAST_S) / _LEAST_S) / _LOG_GAMMA) for b in bounds_s]
        return tuple(sums[bisect_right(buckets, at)] for at in last)


class Marks:
    """By when a counter stood so, within 10 ms or 5 % of the time since, as far as it is told.

    Told again and again how the counter stands, it keeps some 500 marks: dense lately, sparse long
    ago. What happened between two of them counts as of the later one.
    """

    __slots__ = ("_counts", "_due", "_first", "_times")

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._times: list[float] = []
        self._due = -math.inf
        self._first: float = math.inf  # of what was before this nothing is known

    def note(self, count: int, now: float) -> None:
        """Note that the counter stands at ``count`` at ``now``. Neither ever falls."""
        if self._counts and count == self._counts[-1]:
            return
        if now < self._due:
            # The mark before stands for the whole 10 ms: what follows has not been waiting for it.
            self._counts[-1] = count
            return
        self._due = now + _SPACING_S
        self._first = min(self._first, count)
        self._counts.append(count)
        self._times.append(now)
        if len(self._counts) > _MARKS:
            self._thin(now)

    def when(self, count: int, now: float) -> float | None:
        """Return by when it stood at ``count``, ``now`` at the latest; None if nobody knows."""
        if count < self._first:
            return None
        at = bisect_left(self._counts, count)
        return self._times[at] if at < len(self._times) else now

    def seconds_since(self, count: int, now: float) -> float | None:
        """Return the seconds from when it stood at ``count`` to ``now``; None if nobody knows."""
        since = self.when(count, now)
        return None if since is None else max(0.0, now - since)

    def copy(self) -> Marks:
        """Return the marks as they are now."""
        twin = Marks()
        twin._counts, twin._times = [*self._counts], [*self._times]
        twin._due, twin._first = self._due, self._first
        return twin

    def _thin(self, now: float) -> None:
        """Leave out marks that lie close together, for how long ago they are."""
        counts, times = [self._counts[0]], [self._times[0]]
        for i in range(1, len(self._times) - 1):
            if self._times[i + 1] - times[-1] > _ACCURACY * (now - self._times[i + 1]):
                counts.append(self._counts[i])
                times.append(self._times[i])
        self._counts = [*counts, self._counts[-1]]
        self._times = [*times, self._times[-1]]
        if len(self._counts) > _MARKS * 3 // 4:  # many years of them, or time stands still
            self._first = self._counts[_MARKS // 4 - 1] + 1
            del self._counts[: _MARKS // 4], self._times[: _MARKS // 4]
