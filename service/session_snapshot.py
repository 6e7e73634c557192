"""Places in a conversation: what was said up to there, and how to go back.

Knows turns and their order; nothing of engines or leases, or of who stands where.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import InvalidRequest
from radixkv.service.session_reply import Turn
from radixkv.service.session_text import Transcript


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Snapshot:
    """A place in a conversation. Never changes; what comes after it points back to it."""

    transcript: Transcript
    turn: Turn | None = None
    before: Snapshot | None = None
    number: int = 0
    """Turns up to here."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was sent and answered up to here, the first first. O(turns)."""
        found = []
        at: Snapshot | None = self
        while at is not None and at.turn is not None:
            found.append(at.turn)
            at = at.before
        return tuple(reversed(found))

    def then(self, transcript: Transcript, turn: Turn) -> Snapshot:
        """Return the place after one more turn."""
        return Snapshot(transcript, turn, self, self.number + 1)

    def back_to(self, turn: int) -> Snapshot:
        """Return the end of ``turn`` (0: the beginning; -1: one turn back); InvalidRequest if there
        is no such turn."""
        number = self.number
        wanted = turn if turn >= 0 else number + turn
        if not 0 <= wanted <= number:
            wanted_is = (
                f"wanted 0 to {number}, or a negative number down to -{number} to count from "
                "the end"
                if number
                else "wanted 0"
            )
            raise InvalidRequest(
                f"rewind({turn}): the session has {number} turns; {wanted_is}", param="turn"
            )
        at = self
        while at.number > wanted:
            assert at.before is not None
            at = at.before
        return at
