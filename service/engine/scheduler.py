"""Which tokens are computed in the next step, and who waits, starts, yields its blocks or goes.

Knows sequences, blocks and budgets; nothing of tensors, text or threads. A step computes at most
``max_batch_tokens`` tokens: first one for each sequence that is decoding, then chunks of prompts
(chunked prefill: Sarathi-Serve), those of running sequences as those of newly admitted ones. Whose
turn it is, to start and to be computed, fairness.py says; inside a tenant, waiting.py and age.

What happens when blocks run out is always explicit: a waiting sequence goes on waiting and holds
nothing; a running one takes the blocks of the *latest* request, which publishes what it has
computed and recomputes later what was evicted meanwhile. The oldest request is never preempted by a
younger one and always fits alone (the engine refuses what never fits), so there is always progress.

Batch work counts as younger than all that is not. It starts only if nothing interactive is short of
room, and within ``batch_share`` of the places and of the blocks, but for a single sequence that
would not run otherwise; what it has beyond that it yields as soon as interactive work needs room.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from radixkv.blocks import BlockCopy
from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.service.engine.admission import (
    blocks_for,
    has_room,
    leader_of,
    projected_growth,
)
from radixkv.service.engine.counters import Counters
from radixkv.service.engine.explaining import SIBLING_TOKENS, explain_admission
from radixkv.service.engine.fairness import MAX_PASSES, Account, Fairness, TenantShare
from radixkv.service.engine.lookups import Lookup, Stopped, keep
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.swap import Swapper
from radixkv.service.engine.waiting import WINDOW, Waiting
from radixkv.table import BlockTable


@dataclass(slots=True, eq=False)
class Work:
    """Compute the next ``num_tokens`` tokens of ``seq``, after doing ``copies`` on the device."""

    seq: Sequence
    table: BlockTable
    num_tokens: int
    copies: list[BlockCopy]
    ends_public: bool = False
    """It ends where a public prefix does, inside a block: others can share all of it, if told."""

    @property
    def reaches_end(self) -> bool:
        """Whether the step leaves nothing to compute, so that a token is to be drawn."""
        return self.num_tokens == self.seq.remaining


@dataclass(slots=True, eq=False)
class Plan:
    """A step in the making."""

    budget: int
    """Tokens that may still be put to work."""
    works: dict[Sequence, Work] = field(default_factory=dict)
    prompts: dict[Account, list[Sequence]] = field(default_factory=dict)
    """Running sequences that have more than one token to compute, by age."""
    places: int = 0
    """Choices that may start."""
    growth: int = 0
    """Blocks that the running ones will soon take."""
    width: int = WINDOW
    """Look-ups for each tenant that waits."""
    looks: int = WINDOW
    """Look-ups in all."""
    tries: dict[Account, Iterator[tuple[Sequence, int]]] = field(default_factory=dict)
    short: list[Account] = field(default_factory=list)
    """Accounts of which a sequence had the turn, and no room."""


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
        batch_share: float = 0.75,
        swapper: Swapper | None = None,
    ) -> None:
        self.cache = cache
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # by age
        self.fairness = Fairness(quantum=max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._lookahead_tokens = lookahead_tokens
        self._counters = counters
        self._share = share  # False: nobody's blocks can be found, so nobody waits for them
        self._batch_places = max(1, int(batch_share * max_num_seqs))
        self._batch_blocks = int(batch_share * cache.num_blocks)
        self.hopeless: list[Sequence] = []
        """Those that had no room though nobody ran, because of what was promised to others since
        they came; whoever runs the steps tells them, and empties it."""
        self._swapper = swapper
        self._competed = False  # prompts of several accounts shared the last step

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def set_share(self, tenant: str, share: TenantShare) -> None:
        """Give a tenant another weight and other limits from the next step on."""
        self.fairness.set_share(tenant, share)

    def settle(self) -> set[str]:
        """Charge what the last step cost; return the tenants of whom a number is new."""
        changed = self.fairness.changed
        if not changed:
            return set()
        self.fairness.settle(waited=self.waiting.beside(changed), competed=self._competed)
        tenants = {account.tenant for account in changed}
        changed.clear()
        return tenants

    def add(self, seq: Sequence) -> None:
        """Let ``seq``, the first of its request, wait for its turn."""
        request = seq.request
        request.account = self.fairness.account(request.origin.tenant, request.origin.batch)
        request.account.requests += 1
        self.waiting.add(seq)
        self.fairness.changed.add(request.account)

    def schedule(self) -> list[Work]:
        """Choose the next step's work; its blocks are reserved when this returns."""
        plan = Plan(self._max_batch_tokens)
        for seq in [seq for seq in self.running if seq.remaining == 1]:
            if plan.budget == 0:
                break
            self._go_on(seq, plan)
        if len(plan.works) < len(self.running):
            for seq in self.running:
                if seq.remaining > 1:
                    plan.prompts.setdefault(seq.request.account, []).append(seq)
        if plan.budget and self.waiting:
            self._admit(plan)
        self._competed = len(plan.prompts) > 1
        if plan.budget:
            for account in self.fairness.compute_order(plan.prompts):
                for seq in tuple(plan.prompts[account]):
                    if plan.budget == 0:
                        break
                    self._go_on(seq, plan)
        return list(plan.works.values())

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
        at = self.running.index(first) + 1
        self.running[at:at] = born

    def finish(self, seq: Sequence, *, publish: bool = True) -> None:
        """``seq`` is done, wherever it was: its blocks stay cached or become free."""
        if self._swapper is not None:
            self._swapper.forget(seq)
        if seq.table is None:
            self.waiting.remove(seq)
        else:
            if publish:
                seq.publish(tail=True)
            self._stop(seq)
        account = seq.request.account
        if not account.num_waiting:
            account.passed = 0
        self.fairness.changed.add(account)
        seq.request.sequences.remove(seq)

    def forget_saved(self, request: Request) -> None:
        """Give up what host memory has of ``request``: it is of no use any more."""
        for seq in request.sequences:
            if self._swapper is not None:
                self._swapper.forget(seq)

    def check(self) -> list[str]:
        """Return each broken invariant in words. O(sequences)."""
        wrong = []
        for account in self.fairness:
            mine = [seq for seq in self.running if seq.request.account is account]
            waiting = sum(seq.request.account is account for seq in self.waiting)
            places = sum(1 + seq.request.unborn for seq in mine)
            counted = (account.num_running, account.num_waiting, account.places)
            if counted != (len(mine), waiting, places):
                wrong.append(
                    f"tenant {account.tenant!r} runs, waits and has places {counted} by count, "
                    f"{(len(mine), waiting, places)} by walk"
                )
        if self._swapper is not None:
            everybody = [*self.running, *self.waiting]
            saved = sum(seq.saved.num_bytes for seq in everybody if seq.saved is not None)
            if saved != self._swapper.pool.used_bytes:
                wrong.append(
                    f"{self._swapper.pool.used_bytes} bytes of host memory are taken, {saved} used"
                )
        if [seq.order for seq in self.running] != sorted(seq.order for seq in self.running):
            wrong.append("the running sequences are out of order")
        return wrong

    # -- running -----------------------------------------------------------------------------------

    def _go_on(self, seq: Sequence, plan: Plan) -> None:
        """Put the next tokens of ``seq`` to work, preempting the latest while blocks lack.

        Does nothing if it was preempted by one that came before it, or has to yield itself.
        """
        while seq.table is not None:
            try:
                left = seq.remaining
                if seq.saved is not None and self._swapper is not None:
                    left = self._swapper.restore(seq)
                num_tokens, border = min(left, plan.budget), None
                if left > 1:
                    border = seq.table.tokens_to_border
                    num_tokens = min(num_tokens, border or num_tokens)
                copies = seq.table.reserve(num_tokens)
            except OutOfBlocks:
                for victim in self._latest_after(seq) or [seq]:
                    self._preempt(victim, plan)
                continue
            plan.works[seq] = Work(seq, seq.table, num_tokens, copies, num_tokens == border)
            plan.budget -= num_tokens
            return

    def _latest_after(self, seq: Sequence) -> list[Sequence]:
        """Whom ``seq`` may preempt: the latest younger request whole, else a younger sibling.

        Empty if ``seq`` is itself the latest.
        """
        last = self.running[-1]
        if last.request is seq.request:
            return [last] if last is not seq else []
        return [other for other in self.running if other.request is last.request]

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        work = plan.works.pop(seq, None)
        prompts = plan.prompts.get(seq.request.account)
        if prompts is not None and seq in prompts:
            prompts.remove(seq)
        seq.publish(tail=True)
        swapped = self._yield_blocks(seq, unmade_copy=work is not None and bool(work.copies))
        seq.preemptions += 1
        self.waiting.add(seq)
        self.fairness.changed.add(seq.request.account)
        self._counters.note_preempted(seq, swapped=swapped)

    def _yield_blocks(self, seq: Sequence, *, unmade_copy: bool) -> bool:
        """Let the blocks of ``seq`` go; tell whether what only it held was saved.

        ``unmade_copy``: its last tokens lie in a block that was to be copied, and is not.
        """
        if self._swapper is None:
            self._stop(seq)
            return False
        assert seq.table is not None
        size, num_tokens, blocks = self.cache.block_size, seq.table.num_tokens, seq.table.blocks
        before = self.cache.available
        self._stop(seq)
        # What nobody else holds can be taken now, and it is the end: others hold beginnings.
        num_shared = max(0, len(blocks) - (self.cache.available - before))
        if unmade_copy:
            num_tokens -= num_tokens % size
        return self._swapper.save(seq, blocks, num_shared, num_tokens)

    def _start(self, seq: Sequence, table: BlockTable) -> None:
        seq.table = table
        account = seq.request.account
        account.num_running += 1
        account.places += 1 + seq.request.unborn
        at = len(self.running)
        while at and self.running[at - 1].order > seq.order:
            at -= 1
        self.running.insert(at, seq)
        first = seq.request.cached_tokens is None
        self._counters.note_start(seq)
        if seq.saved is not None and self._swapper is not None:
            with contextlib.suppress(OutOfBlocks):  # then later, when others have yielded theirs
                self._swapper.restore(seq)
        stream = seq.request.stream
        if first:
            wanted = SIBLING_TOKENS if stream.explain else 0
            explained = explain_admission(self, seq, table.cached_tokens, context=wanted)
            self._counters.observer.missed(seq.request, explained.reasons)
            if stream.explain:
                stream.explained = explained

    def _stop(self, seq: Sequence) -> None:
        """Let the blocks of ``seq`` go; it runs no more."""
        assert seq.table is not None
        account = seq.request.account
        account.num_running -= 1
        account.places -= 1 + seq.request.unborn
        self.running.remove(seq)
        seq.table.release()
        seq.table = None

    # -- starting ----------------------------------------------------------------------------------

    def _admit(self, plan: Plan) -> None:
        """Start waiting sequences while tokens, places and blocks last."""
        plan.places = self._free_places()
        if plan.places <= 0:
            return
        plan.growth = sum(map(self._growth, self.running))
        accounts = self.waiting.accounts
        if len(accounts) > 1:
            self._survey(accounts)
            plan.width = max(1, WINDOW // len(accounts))
        for batch in (False, True):
            lane = [account for account in accounts if account.batch is batch]
            while lane:
                account = self.fairness.next_to_start(lane)
                if not self._take_turn(account, plan, alone=len(lane) == 1):
                    lane.remove(account)
                if plan.places <= 0 or any(other.passed >= MAX_PASSES for other in plan.short):
                    return
            if plan.short:
                return  # batch work takes no room that others wait for

    def _survey(self, accounts: list[Account]) -> None:
        """See how many prompt tokens each tenant's running sequences have yet to compute."""
        for account in accounts:
            account.committed = 0
        for seq in self.running:
            seq.request.account.committed = 0
        for seq in self.running:
            seq.request.account.committed += max(0, len(seq.request.prompt_ids) - seq.high)

    def _take_turn(self, account: Account, plan: Plan, *, alone: bool) -> bool:
        """Start sequences of one account until it has had a quantum or has none left to try.

        Returns whether it may have more to start in this step.
        """
        queue = self.waiting.queue(account)
        if queue is None or self._tokens_ahead(account, plan) >= plan.budget:
            return False
        tries = plan.tries.get(account)
        if tries is None:
            width = min(plan.width, plan.looks)
            plan.looks -= min(width, len(queue.sequences))
            tries = plan.tries[account] = iter(queue.candidates(self.cache, width))
        most = account.admission_level + self.fairness.quantum
        priority: int | None = None
        barrier: Sequence | None = None
        for seq, cached in tries:
            if seq.priority != priority:
                priority, barrier = seq.priority, queue.barrier(seq.priority)
            if barrier is not None and barrier.order < seq.order:
                continue  # its turn has come: nobody younger goes ahead
            if not self.fairness.has_place(account, 1 + seq.request.unborn):
                return False
            if self._share and self._leader(seq, cached) is not None:
                continue
            table = self._open(seq, cached, plan)
            if table is None:
                if account not in plan.short:
                    plan.short.append(account)
                continue
            self.waiting.remove(seq)
            self._start(seq, table)
            queue.note_admitted(seq)
            priority = None
            plan.places -= 1 + seq.request.unborn
            plan.growth += self._growth(seq)
            plan.prompts.setdefault(account, []).append(seq)
            self.fairness.note_start(account, max(0, len(seq.request.prompt_ids) - seq.high))
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
            if other is account or self.fairness.is_ahead(other, account)
            for seq in prompts
        )

    def _free_places(self) -> int:
        return self._max_num_seqs - sum(1 + seq.request.unborn for seq in self.running)

    def _open(self, seq: Sequence, cached: int, plan: Plan) -> BlockTable | None:
        """Open a table for ``seq`` if there is room; batch work may have to make some."""
        if seq.request.origin.batch:
            return self._try_open(seq, cached, plan) if self._batch_may(seq) else None
        table = self._try_open(seq, cached, plan)
        while table is None and self._shed_batch(plan):
            table = self._try_open(seq, cached, plan)
        return table

    def _try_open(self, seq: Sequence, cached: int, plan: Plan) -> BlockTable | None:
        """Acquire what is cached of ``seq`` if there is room for the rest; None, and nothing held,
        if there is not."""
        cache, request, growth = self.cache, seq.request, plan.growth
        alone = not self.running
        tenant = request.identity.namespace.tenant
        if not alone and (
            1 + request.unborn > plan.places
            or cache.available_to(tenant) - growth
            < blocks_for(seq.num_tokens - cached, cache.block_size)
        ):
            return None
        saved = seq.saved
        from_host = saved is not None and (
            saved.first_block * cache.block_size <= cached < saved.num_tokens
        )
        limits = [cached - cached % cache.block_size if from_host else cached]
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
            host = max(0, saved.num_tokens - max(taken, saved.first_block * self.cache.block_size))
        stopped: Stopped = "not_resident"
        if not self._share or not request.may_read_cache:
            stopped = "off"
        elif taken == seq.num_tokens - 1:
            stopped = "last_token"
        elif host:
            stopped = "host"
        elif taken < found:
            stopped = "no_room"
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

    def _leader(self, seq: Sequence, cached: int) -> Sequence | None:
        return leader_of(seq, cached, self.running, self.cache.block_size)

    def _growth(self, seq: Sequence) -> int:
        return projected_growth(seq, self._lookahead_tokens, self.cache.block_size)

    # -- batch work --------------------------------------------------------------------------------

    def _batch_may(self, seq: Sequence) -> bool:
        """Whether batch work stays inside its share with ``seq``; one sequence may always run."""
        running = list(self._running_batch())
        places = sum(1 + other.request.unborn for other in running) + 1 + seq.request.unborn
        blocks = self._blocks_of(running) + sum(map(self._growth, running))
        blocks += blocks_for(seq.num_tokens + seq.request.unborn, self.cache.block_size)
        inside = places <= self._batch_places and blocks <= self._batch_blocks
        return inside or not self.running

    def _shed_batch(self, plan: Plan) -> bool:
        """Preempt the latest batch request if batch work is beyond its share; tell if it was."""
        running = list(self._running_batch())
        places = sum(1 + seq.request.unborn for seq in running)
        if places <= self._batch_places and self._blocks_of(running) <= self._batch_blocks:
            return False
        last = running[0].request
        for seq in [seq for seq in running if seq.request is last]:
            self._preempt(seq, plan)
        plan.places = self._free_places()
        plan.growth = sum(map(self._growth, self.running))
        return True

    def _running_batch(self) -> Iterator[Sequence]:
        """The running batch sequences, youngest first."""
        return itertools.takewhile(lambda seq: seq.request.origin.batch, reversed(self.running))

    def _blocks_of(self, sequences: list[Sequence]) -> int:
        return sum(seq.table.num_blocks for seq in sequences if seq.table is not None)
