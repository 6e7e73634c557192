"""Which tokens are computed in the next step, and who waits, starts, yields its blocks or goes.

Knows sequences, blocks and budgets; nothing of tensors, text or threads. A step computes at most
``max_batch_tokens`` tokens: first one for each sequence that is decoding, then chunks of prefills,
oldest first, then those of newly admitted sequences (chunked prefill: Sarathi-Serve).

What happens when blocks run out is always explicit: a waiting sequence goes on waiting and holds
nothing; a running one takes the blocks of the *latest* request, which publishes what it has
computed and recomputes later what was evicted meanwhile. The oldest request is never preempted by a
younger one and always fits alone (the engine refuses what never fits), so there is always progress.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.blocks import BlockCopy
from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.service.engine.admission import (
    Waiting,
    blocks_for,
    has_room,
    leader_of,
    projected_growth,
)
from radixkv.service.engine.counters import Counters
from radixkv.service.engine.request import Request, Sequence
from radixkv.table import BlockTable


@dataclass(slots=True, eq=False)
class Work:
    """Compute the next ``num_tokens`` tokens of ``seq``, after doing ``copies`` on the device."""

    seq: Sequence
    table: BlockTable
    num_tokens: int
    copies: list[BlockCopy]

    @property
    def reaches_end(self) -> bool:
        """Whether the step leaves nothing to compute, so that a token is to be drawn."""
        return self.num_tokens == self.seq.remaining


class Scheduler:
    """Owns the waiting and the running sequences of one engine; used by its thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        lookahead_tokens: int,
        counters: Counters,
        share: bool = True,
    ) -> None:
        self.cache = cache
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # by age
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._lookahead_tokens = lookahead_tokens
        self._counters = counters
        self._share = share  # False: nobody's blocks can be found, so nobody waits for them

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def add(self, seq: Sequence) -> None:
        """Let ``seq`` wait for its turn."""
        self.waiting.add(seq)

    def schedule(self) -> list[Work]:
        """Choose the next step's work; its blocks are reserved when this returns."""
        works: dict[Sequence, Work] = {}
        budget = self._max_batch_tokens
        decoding = [seq for seq in self.running if seq.remaining == 1]
        prefilling = [seq for seq in self.running if seq.remaining > 1]
        for seq in decoding + prefilling:
            if budget == 0:
                break
            if seq.table is None:  # preempted by one that came before it in this loop
                continue
            budget -= self._reserve(seq, min(seq.remaining, budget), works)
        if budget and self.waiting:
            self._admit(budget, works)
        return list(works.values())

    def fork(self, request: Request, born: list[Sequence]) -> None:
        """Start ``born``, the other choices of ``request``, on the blocks of its first one."""
        (first,) = request.sequences
        assert first.table is not None
        request.forked = True
        for seq in born:
            seq.table = first.table.fork()
            seq.high = first.high
            request.sequences.append(seq)
        at = self.running.index(first) + 1
        self.running[at:at] = born

    def finish(self, seq: Sequence, *, publish: bool = True) -> None:
        """``seq`` is done, wherever it was: its blocks stay cached or become free."""
        if seq.table is None:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            if publish:
                seq.publish(tail=True)
            seq.table.release()
            seq.table = None
        seq.request.sequences.remove(seq)

    def _reserve(self, seq: Sequence, num_tokens: int, works: dict[Sequence, Work]) -> int:
        """Reserve the next ``num_tokens`` of ``seq``, preempting the latest while blocks lack.

        Returns the tokens put to work: 0 if ``seq`` itself had to yield.
        """
        while True:
            assert seq.table is not None
            try:
                copies = seq.table.reserve(num_tokens)
            except OutOfBlocks:
                victims = self._latest_after(seq)
                for victim in victims or [seq]:
                    self._preempt(victim, works)
                if victims:
                    continue
                return 0
            works[seq] = Work(seq, seq.table, num_tokens, copies)
            return num_tokens

    def _latest_after(self, seq: Sequence) -> list[Sequence]:
        """Whom ``seq`` may preempt: the latest younger request whole, else a younger sibling.

        Empty if ``seq`` is itself the latest.
        """
        last = self.running[-1]
        if last.request is seq.request:
            return [last] if last is not seq else []
        return [other for other in self.running if other.request is last.request]

    def _preempt(self, seq: Sequence, works: dict[Sequence, Work]) -> None:
        assert seq.table is not None
        works.pop(seq, None)
        seq.publish(tail=True)
        seq.table.release()
        seq.table = None
        seq.preemptions += 1
        self.running.remove(seq)
        self.waiting.add(seq)
        self._counters.preemptions += 1

    def _admit(self, budget: int, works: dict[Sequence, Work]) -> None:
        """Start waiting sequences while tokens, places and blocks last."""
        places = self._max_num_seqs - sum(1 + seq.request.unborn for seq in self.running)
        if places <= 0:
            return
        growth = sum(map(self._growth, self.running))
        overdue = self.waiting.overdue
        for seq, cached in self.waiting.candidates(self.cache):
            if budget == 0 or places <= 0:
                return
            if overdue is not None and overdue.order < seq.order:
                return  # its turn has come: nobody younger goes ahead
            if self._share and self._leader(seq, cached) is not None:
                continue
            table = self._try_open(seq, cached, growth, places)
            if table is None:
                continue
            self.waiting.remove(seq)
            self._start(seq, table)
            self.waiting.note_admitted(seq)
            overdue = self.waiting.overdue
            places -= 1 + seq.request.unborn
            budget -= self._reserve(seq, min(seq.remaining, budget), works)
            if seq.table is not None:
                growth += self._growth(seq)

    def _try_open(self, seq: Sequence, cached: int, growth: int, places: int) -> BlockTable | None:
        """Acquire what is cached of ``seq`` if there is room for the rest; None, and nothing held,
        if there is not."""
        cache, request = self.cache, seq.request
        alone = not self.running
        if not alone and (
            1 + request.unborn > places
            or cache.available - growth < blocks_for(seq.num_tokens - cached, cache.block_size)
        ):
            return None
        limits = [cached]
        if alone:
            # It must start now. A copied partial block needs its source as well; where that is one
            # block too many, do with the whole blocks, and at last with none.
            limits += [cached - cached % cache.block_size, 0]
        for limit in limits:
            lease = cache.acquire(
                request.identity,
                bytes(seq.tokens),
                max_cached=limit,
                resumed=request.cached_tokens is not None,
            )
            if has_room(
                seq,
                lease.cached_tokens // cache.block_size,
                cache.available,
                growth,
                cache.block_size,
                alone=alone,
            ):
                return cache.open(lease)
            lease.cancel()
        return None

    def _leader(self, seq: Sequence, cached: int) -> Sequence | None:
        return leader_of(seq, cached, self.running, self.cache.block_size)

    def _growth(self, seq: Sequence) -> int:
        return projected_growth(seq, self._lookahead_tokens, self.cache.block_size)

    def _start(self, seq: Sequence, table: BlockTable) -> None:
        seq.table = table
        at = len(self.running)
        while at and self.running[at - 1].order > seq.order:
            at -= 1
        self.running.insert(at, seq)
        self._counters.note_start(seq)
