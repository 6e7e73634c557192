"""How long things took lately: for choices by cost, such as to copy or to compute.

Knows amounts and seconds; nothing of what they are of.
"""

from __future__ import annotations

_DECAY = 0.8  # of what was measured before, at each new measurement


class Rate:
    """How long something took lately, for each unit of it."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Doing ``amount`` took ``seconds``."""
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """Return what ``amount`` would take; None if nothing was measured yet."""
        return amount * self._seconds / self._amount if self._amount else None

    def amount(self, seconds: float) -> float:
        """Return how much could be done in ``seconds``; 0 if nothing was measured yet."""
        return seconds * self._amount / self._seconds if self._seconds else 0.0


class PrefillRate(Rate):
    """The same, of prompt tokens, by the steps in which they were computed."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting_tokens = self._waiting_seconds = 0.0  # of steps whose end was not waited for

    def note_step(
        self, prompt_tokens: int, num_tokens: int, seconds: float, *, ended: bool
    ) -> None:
        """A step computed so many tokens. ``ended``: the device is known to be done with it."""
        self._waiting_seconds += seconds
        self._waiting_tokens += prompt_tokens
        if ended:
            if 2 * prompt_tokens >= num_tokens:  # else it tells of decoding
                self.note(self._waiting_tokens, self._waiting_seconds)
            self._waiting_tokens = self._waiting_seconds = 0.0
