"""How much of the engine batch work may have, and that it yields what is beyond.

Knows running sequences, places and blocks; nothing of whose turn it is. Batch work counts as
younger than all that is not. It stays within its share of the places and of the blocks, but for a
single sequence that would not run otherwise; what it has beyond that, because it was there before
interactive work came, it yields as soon as that needs room.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from radixkv.service.engine.admission import blocks_for
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.running import Running
from radixkv.service.engine.work import Plan


class BatchWork:
    """The part of the running sequences that is batch work, and its bounds."""

    def __init__(
        self, running: Running, *, max_places: int, max_blocks: int, block_size: int
    ) -> None:
        self._running = running
        self._max_places = max_places
        self._max_blocks = max_blocks
        self._block_size = block_size

    def may_start(self, seq: Sequence) -> bool:
        """Tell whether batch work stays inside its share with ``seq``; one may always run."""
        running = list(self._youngest_first())
        places = _places_of(running) + 1 + seq.request.unborn
        blocks = _blocks_of(running) + sum(map(self._running.growth_of, running))
        blocks += blocks_for(seq.num_tokens + seq.request.unborn, self._block_size)
        inside = places <= self._max_places and blocks <= self._max_blocks
        return inside or not self._running.sequences

    def shed(self, plan: Plan) -> bool:
        """Preempt the latest batch request if batch work is beyond its share; tell if it was."""
        running = list(self._youngest_first())
        if _places_of(running) <= self._max_places and _blocks_of(running) <= self._max_blocks:
            return False
        last = running[0].request
        for seq in [seq for seq in running if seq.request is last]:
            self._running.preempt(seq, plan)
        plan.places = self._running.free_places
        plan.growth = self._running.growth
        return True

    def _youngest_first(self) -> Iterator[Sequence]:
        return itertools.takewhile(
            lambda seq: seq.request.origin.batch, reversed(self._running.sequences)
        )


def _places_of(sequences: Iterable[Sequence]) -> int:
    return sum(1 + seq.request.unborn for seq in sequences)


def _blocks_of(sequences: Iterable[Sequence]) -> int:
    return sum(seq.table.num_blocks for seq in sequences if seq.table is not None)
