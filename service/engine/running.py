"""Those who run, by age: their next tokens, and who yields when blocks run out.

Knows sequences, tables and blocks; nothing of turns among tenants, or of how one gets to run.

A running sequence that lacks a block takes those of the *latest* request, which publishes what it
has computed. What only it held is saved to the host where that is cheaper (swap.py), else computed
again later. The oldest request is never preempted by a younger one and always fits alone (the
engine refuses what never fits), so there is always progress.
"""

from __future__ import annotations

import contextlib
import logging

from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.service.engine.admission import projected_growth
from radixkv.service.engine.beams_running import must_wait, preempt_beams
from radixkv.service.engine.counters import Counters
from radixkv.service.engine.explaining import SIBLING_TOKENS, explain_admission
from radixkv.service.engine.fairness import Fairness
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.swap import Swapper
from radixkv.service.engine.waiting import Waiting
from radixkv.service.engine.work import Plan, Work
from radixkv.table import BlockTable

log = logging.getLogger("radixkv.engine")


class Running:
    """The running sequences of one engine, and what they hold."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: Waiting,
        fairness: Fairness,
        counters: Counters,
        *,
        max_num_seqs: int,
        lookahead_tokens: int,
        swapper: Swapper | None,
    ) -> None:
        self.sequences: list[Sequence] = []  # by age
        self.max_num_seqs = max_num_seqs
        self._cache = cache
        self._waiting = waiting  # where those go that are preempted
        self._fairness = fairness
        self._counters = counters
        self._lookahead_tokens = lookahead_tokens
        self._swapper = swapper

    # -- how much they have ------------------------------------------------------------------------

    @property
    def free_places(self) -> int:
        """Choices that may run besides those that do, or are about to be born."""
        return self.max_num_seqs - sum(1 + seq.request.unborn for seq in self.sequences)

    @property
    def growth(self) -> int:
        """Blocks that all of them will soon take."""
        return sum(map(self.growth_of, self.sequences))

    def growth_of(self, seq: Sequence) -> int:
        """Return the blocks that ``seq`` will soon take."""
        return projected_growth(seq, self._lookahead_tokens, self._cache.block_size)

    # -- going on ----------------------------------------------------------------------------------

    def go_on(self, seq: Sequence, plan: Plan) -> None:
        """Put the next tokens of ``seq`` to work, preempting the latest while blocks lack.

        Does nothing if it was preempted by one that came before it, or has to yield itself.
        """
        while (table := seq.table) is not None:
            try:
                left = remaining = len(seq.ids) - table.num_tokens
                if seq.saved is not None and self._swapper is not None:
                    left = self._swapper.restore(seq)
                    remaining = seq.remaining
                num_tokens, border = 1, None
                if left > 1:
                    border = table.tokens_to_border
                    num_tokens = min(left, plan.budget, border or left)
                copies = table.reserve(num_tokens)
            except OutOfBlocks:
                victims = self._latest_after(seq)
                if not victims and must_wait(seq, self, plan):
                    return
                for victim in victims or [seq]:
                    self.preempt(victim, plan)
                continue
            plan.works[seq] = Work(
                seq, table, num_tokens, copies, num_tokens == remaining, num_tokens == border
            )
            plan.budget -= num_tokens
            return

    def _latest_after(self, seq: Sequence) -> list[Sequence]:
        """Whom ``seq`` may preempt: the latest younger request whole, else a younger sibling.

        Empty if ``seq`` is itself the latest.
        """
        last = self.sequences[-1]
        if last.request is seq.request:
            return [last] if last is not seq and seq.request.beams is None else []
        return [other for other in self.sequences if other.request is last.request]

    def preempt(self, seq: Sequence, plan: Plan) -> None:
        """Put ``seq`` back among those who wait, and out of the plan; of beams all or none."""
        if seq.request.beams is None:
            self.lay_down(seq, plan)
            self._waiting.add(seq)
        elif seq.table is not None:  # else it went together with a sibling
            self._waiting.add(preempt_beams(seq.request, self, plan))

    def lay_down(self, seq: Sequence, plan: Plan) -> None:
        """Take ``seq`` out of the plan, and its blocks."""
        work = plan.works.pop(seq, None)
        prompts = plan.prompts.get(seq.request.account)
        if prompts is not None and seq in prompts:
            prompts.remove(seq)
        seq.publish(tail=True)
        swapped = self._yield_blocks(seq, unmade_copy=work is not None and bool(work.copies))
        seq.preemptions += 1
        self._fairness.changed.add(seq.request.account)
        self._counters.note_preempted(seq, swapped=swapped)

    def _yield_blocks(self, seq: Sequence, *, unmade_copy: bool) -> bool:
        """Let the blocks of ``seq`` go; tell whether what only it held was saved.

        ``unmade_copy``: its last tokens lie in a block that was to be copied, and is not.
        """
        if self._swapper is None:
            self.stop(seq)
            return False
        assert seq.table is not None
        size, num_tokens, blocks = self._cache.block_size, seq.table.num_tokens, seq.table.blocks
        before = self._cache.available
        self.stop(seq)
        # What nobody else holds can be taken now, and it is the end: others hold beginnings.
        num_shared = max(0, len(blocks) - (self._cache.available - before))
        if unmade_copy:
            num_tokens -= num_tokens % size
        return self._swapper.save(seq, blocks, num_shared, num_tokens)

    # -- beginning and ending ----------------------------------------------------------------------

    def start(self, seq: Sequence, table: BlockTable) -> None:
        """Let ``seq``, which waits no more, run on ``table``."""
        seq.table = table
        account = seq.request.account
        account.num_running += 1
        account.places += 1 + seq.request.unborn
        self._fairness.changed.add(account)  # also where others' tokens fill the step
        at = len(self.sequences)
        while at and self.sequences[at - 1].order > seq.order:
            at -= 1
        self.sequences.insert(at, seq)
        first = seq.request.cached_tokens is None
        self._counters.note_start(seq)
        if seq.saved is not None and self._swapper is not None:
            with contextlib.suppress(OutOfBlocks):  # then later, when others have yielded theirs
                self._swapper.restore(seq)
        if first:
            self._explain(seq, table.cached_tokens)

    def _explain(self, seq: Sequence, found_tokens: int) -> None:
        """Account for what the first admission of a request did not find."""
        stream = seq.request.stream
        try:
            explained = explain_admission(
                self._cache,
                self.sequences,
                seq,
                found_tokens,
                context=SIBLING_TOKENS if stream.explain else 0,
            )
        except Exception:  # an account that fails is told of; no request is worth less for it
            log.exception("no account can be given of what a prompt did not find")
            self._counters.violations += 1
            return
        self._counters.observer.missed(seq.request, explained.reasons)
        if stream.explain:
            stream.explained = explained

    def fork(self, request: Request, born: list[Sequence]) -> None:
        """Start ``born``, the other choices of ``request``, on the blocks of its first one."""
        (first,) = request.sequences
        assert first.table is not None
        request.forked = True
        for seq in born:
            seq.table = first.table.fork()
            seq.high = first.high
            request.sequences.append(seq)
        request.account.num_running += len(born)
        at = self.sequences.index(first) + 1
        self.sequences[at:at] = born

    def stop(self, seq: Sequence) -> None:
        """Let the blocks of ``seq`` go; it runs no more."""
        assert seq.table is not None
        account = seq.request.account
        account.num_running -= 1
        account.places -= 1 + seq.request.unborn
        self.sequences.remove(seq)
        seq.table.release()
        seq.table = None
