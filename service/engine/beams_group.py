"""The beams of one request as sequences in the batch: who carries which, and how they are moved.

Knows sequences and their ranks; nothing of blocks beyond that a table can be forked. A request has
one sequence for each beam. A beam that goes on in two ways takes over the sequence of one that
dies, which lets its blocks go and shares those of the beam instead; so a step changes no count of
what runs, and copies nothing: that is left to the next write to a block that is shared.

All beams of a request take their steps together. One whose next tokens are known, while others are
yet to be computed, has nothing to compute and waits; preempted they are together, and then only the
first waits for its turn and the others are asleep, until it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.service.engine.beams_search import BeamSearch, Candidates

if TYPE_CHECKING:
    from radixkv.service.engine.request import Sequence
    from radixkv.service.engine.work import Work


@dataclass(slots=True, eq=False)
class BeamGroup:
    """A search and the sequences that carry it."""

    search: BeamSearch
    ranked: list[Sequence]
    """Those of the running beams, by rank; before the first step only the prompt's."""
    found: dict[Sequence, Candidates] = field(default_factory=dict)
    """What may come next, of those that are computed."""
    asleep: list[Sequence] = field(default_factory=list)
    """Preempted ones that hold nothing and wait for the first of the request to be computed."""
    num_steps: int = 0
    copied_blocks: int = 0
    copied_tokens: int = 0
    """What copies-on-write moved: blocks begun, and the tokens in them."""
    most_copied: int = 0
    """Blocks of the step that copied the most."""

    @property
    def width(self) -> int:
        """Sequences that the request has once it has begun."""
        return self.search.width

    @property
    def ready(self) -> bool:
        """Whether all beams are computed, so that a step can be made."""
        return len(self.found) == len(self.ranked)

    def take_found(self) -> list[Candidates]:
        """Return what may come next, by rank, and forget it."""
        found = [self.found[seq] for seq in self.ranked]
        self.found.clear()
        return found

    def place(self, parents: tuple[int, ...]) -> list[tuple[Sequence, Sequence]]:
        """Give each beam that runs on a sequence; return the moves that this takes.

        A move is (a sequence that has died, the one whose tokens and blocks it shares from now on).
        """
        alive = set(parents)
        free = [seq for rank, seq in enumerate(self.ranked) if rank not in alive]
        taken: set[int] = set()
        moves, after = [], []
        for parent in parents:
            seq = self.ranked[parent]
            if parent in taken:
                moves.append((free.pop(), seq))
                seq = moves[-1][0]
            taken.add(parent)
            after.append(seq)
        self.ranked = after
        return moves

    def wake(self) -> list[Sequence]:
        """Return those asleep, who are no more."""
        asleep, self.asleep = self.asleep, []
        return asleep

    def note_copies(self, works: list[Work]) -> None:
        """Count what a step has copied for the beams; never more than a block each."""
        copies = [copy for work in works for copy in work.copies]
        if copies:
            assert len(copies) <= self.width, "a beam writes to one block that it shares"
            self.copied_blocks += len(copies)
            self.copied_tokens += sum(copy[2] for copy in copies)
            self.most_copied = max(self.most_copied, len(copies))
