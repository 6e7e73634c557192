"""What a simulated memory was used for, averaged over time; shares of all its slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the slots were, and how many sequences ran. The four shares add up to 1.

    ``tokens`` hold KV; ``reserved`` will, before their request ends; ``internal`` were given to a
    request and never will; ``external`` were nobody's, or lost to the allocator's rounding.
    """

    strategy: str
    tokens: float
    reserved: float
    internal: float
    external: float
    batch: float
    """Sequences at once."""
    preemptions: int
    logical: float
    """Tokens of all sequences over the slots: above ``tokens`` where they share some."""


class Meter:
    """Adds up states that last for a while: the steady ones, or all where there are none."""

    def __init__(self, strategy: str, capacity: int) -> None:
        self._strategy = strategy
        self._capacity = capacity
        self._sums = {True: [0.0] * 5, False: [0.0] * 5}  # by whether the state was steady
        self._time = {True: 0.0, False: 0.0}
        self.preemptions = 0

    def add(
        self,
        duration: float,
        *,
        steady: bool,
        tokens: float,
        reserved: float,
        internal: float,
        batch: float,
        logical: float | None = None,
    ) -> None:
        """Count a state, in slots, that lasted ``duration`` steps.

        ``steady``: the memory was neither filling up at the beginning nor emptying at the end.
        """
        self._time[steady] += duration
        values = (tokens, reserved, internal, batch, tokens if logical is None else logical)
        for i, value in enumerate(values):
            self._sums[steady][i] += duration * value

    def usage(self) -> Usage:
        """Return the averages."""
        steady = self._time[True] > 0
        time = self._time[steady] or 1.0
        tokens, reserved, internal, batch, logical = (n / time for n in self._sums[steady])
        return Usage(
            self._strategy,
            tokens=tokens / self._capacity,
            reserved=reserved / self._capacity,
            internal=internal / self._capacity,
            external=1.0 - (tokens + reserved + internal) / self._capacity,
            batch=batch,
            preemptions=self.preemptions,
            logical=logical / self._capacity,
        )
