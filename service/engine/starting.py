"""Who of those that wait starts in this step: turn by turn, while tokens, places and blocks last.

Whose turn it is fairness.py says, and inside a tenant waiting.py; whether one sequence may start,
admission.py. A sequence that may not goes on waiting, and holds nothing.
"""

from __future__ import annotations

from radixkv.cache import PrefixCache
from radixkv.service.engine.admission import blocks_for, has_room, leader_of
from radixkv.service.engine.batch_work import BatchWork
from radixkv.service.engine.fairness import Fairness
from radixkv.service.engine.lookups import Lookup, keep, stopped_by
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.running import Running
from radixkv.service.engine.shares import Account
from radixkv.service.engine.turns import MAX_PASSES
from radixkv.service.engine.waiting import WINDOW, Waiting
from radixkv.service.engine.work import Plan
from radixkv.table import BlockTable


class Starter:
    """Moves sequences from those that wait to those that run."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: Waiting,
        running: Running,
        fairness: Fairness,
        batch_work: BatchWork,
        *,
        share: bool,
    ) -> None:
        self.hopeless: list[Sequence] = []
        """Those that had no room though nobody ran, because of what was promised to others since
        they came; whoever runs the steps tells them, and empties it."""
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._fairness = fairness
        self._batch_work = batch_work
        self._share = share  # False: nobody's blocks can be found, so nobody waits for them

    def start(self, plan: Plan) -> None:
        """Start waiting sequences while tokens, places and blocks last; adds to the prompts."""
        plan.places = self._running.free_places
        if plan.places <= 0:
            return
        plan.growth = self._running.growth
        # Those at their own limit have no turn, and take up none of the look-ups.
        accounts = [a for a in self._waiting.accounts if self._fairness.has_place(a, 1)]
        if len(accounts) > 1:
            self._survey(accounts)
            plan.width = max(1, WINDOW // len(accounts))
        for batch in (False, True):
            turns = self._fairness.turns([a for a in accounts if a.batch is batch])
            while turns and (plan.looks > 0 or plan.tries):
                account = turns.next()
                if self._take_turn(account, plan, alone=turns.alone):
                    turns.had()
                else:
                    plan.tries.pop(account, None)
                    turns.drop()
                if plan.places <= 0 or any(other.passed >= MAX_PASSES for other in plan.short):
                    return
            if plan.short:
                return  # batch work takes no room that others wait for

    def _survey(self, accounts: list[Account]) -> None:
        """See how many prompt tokens each tenant's running sequences have yet to compute."""
        running = self._running.sequences
        for account in accounts:
            account.committed = 0
        for seq in running:
            seq.request.account.committed = 0
        for seq in running:
            seq.request.account.committed += max(0, len(seq.request.prompt_ids) - seq.high)

    def _take_turn(self, account: Account, plan: Plan, *, alone: bool) -> bool:
        """Start sequences of one account until it has had a quantum or has none left to try.

        Returns whether it may have more to start in this step.
        """
        queue = self._waiting.queue(account)
        if queue is None or self._tokens_ahead(account, plan) >= plan.budget:
            return False
        tries = plan.tries.get(account)
        if tries is None:
            width = min(plan.width, plan.looks)
            plan.looks -= min(width, len(queue.sequences))
            tries = plan.tries[account] = iter(queue.candidates(self._cache, width))
        most = account.admission_level + self._fairness.quantum
        priority: int | None = None
        barrier: Sequence | None = None
        for seq, cached in tries:
            if seq.priority != priority:
                priority, barrier = seq.priority, queue.barrier(seq.priority)
            if barrier is not None and barrier.order < seq.order:
                continue  # its turn has come: nobody younger goes ahead
            if not self._fairness.has_place(account, 1 + seq.request.unborn):
                return False
            if self._share and self._leader(seq, cached) is not None:
                continue
            table = self._open(seq, cached, plan)
            if table is None:
                if account not in plan.short:
                    plan.short.append(account)
                continue
            self._waiting.remove(seq)
            self._running.start(seq, table)
            queue.note_admitted(seq)
            priority = None
            plan.places -= 1 + seq.request.unborn
            plan.growth += self._running.growth_of(seq)
            plan.prompts.setdefault(account, []).append(seq)
            self._fairness.note_start(account, max(0, len(seq.request.prompt_ids) - seq.high))
            for other in plan.short:
                other.passed += other is not account
            if any(other.passed >= MAX_PASSES for other in plan.short):
                return True
            if plan.places <= 0 or self._tokens_ahead(account, plan) >= plan.budget:
                return False
            if not alone and account.admission_level >= most:
                return True
        return False

    def _tokens_ahead(self, account: Account, plan: Plan) -> int:
        """Prompt tokens to be computed before those of a sequence that would start now."""
        return sum(
            seq.remaining
            for other, prompts in plan.prompts.items()
            if other is account or self._fairness.is_ahead(other, account)
            for seq in prompts
        )

    def _leader(self, seq: Sequence, cached: int) -> Sequence | None:
        return leader_of(seq, cached, self._running.sequences, self._cache.block_size)

    # -- its blocks --------------------------------------------------------------------------------

    def _open(self, seq: Sequence, cached: int, plan: Plan) -> BlockTable | None:
        """Open a table for ``seq`` if there is room; batch work may have to make some."""
        if seq.request.origin.batch:
            may = self._batch_work.may_start(seq)
            return self._try_open(seq, cached, plan) if may else None
        table = self._try_open(seq, cached, plan)
        while table is None and self._batch_work.shed(plan):
            table = self._try_open(seq, cached, plan)
        return table

    def _try_open(self, seq: Sequence, cached: int, plan: Plan) -> BlockTable | None:
        """Acquire what is cached of ``seq`` if there is room for the rest; None, and nothing held,
        if there is not."""
        cache, request, growth = self._cache, seq.request, plan.growth
        alone = not self._running.sequences
        tenant = request.identity.namespace.tenant
        if not alone and (
            1 + request.unborn > plan.places
            or cache.available_to(tenant) - growth
            < blocks_for(seq.num_tokens - cached, cache.block_size)
        ):
            return None
        limits = [seq.takes_of(cached, cache.block_size)]
        if alone:
            # It must start now. A copied partial block needs its source as well; where that is one
            # block too many, do with the whole blocks, and at last with none.
            limits += [cached - cached % cache.block_size, 0]
        for limit in limits:
            lease = cache.acquire(
                request.identity,
                seq.key,
                max_cached=limit,
                resumed=request.cached_tokens is not None,
                batch=request.origin.batch,
            )
            if has_room(
                seq,
                lease.cached_tokens // cache.block_size,
                cache.available_to(tenant),
                growth,
                cache.block_size,
                alone=alone,
            ):
                self._trace(seq, lease.cached_tokens, cached)
                return cache.open(lease)
            lease.cancel()
        if alone:
            self.hopeless.append(seq)
        return None

    def _trace(self, seq: Sequence, taken: int, found: int) -> None:
        """Note what an admission of ``seq`` took of what it found (DIAG-1)."""
        request, saved, host = seq.request, seq.saved, 0
        if saved is not None:
            host = max(0, saved.num_tokens - max(taken, saved.first_block * self._cache.block_size))
        stopped = stopped_by(
            taken,
            found,
            seq.num_tokens,
            reads=self._share and request.may_read_cache,
            on_host=host > 0,
        )
        keep(
            request.stream.lookups,
            Lookup(
                choice=seq.index,
                identity=request.identity,
                queried_tokens=seq.num_tokens,
                device_tokens=taken,
                host_tokens=host,
                stopped=stopped,
                resumed=request.cached_tokens is not None,
            ),
        )
