"""Which tokens are computed in the next step, and who waits, runs, ends.

Knows sequences, blocks and budgets; nothing of tensors, text or threads. A step computes at most
``max_batch_tokens`` tokens: first one for each sequence that is decoding, then chunks of prompts
(chunked prefill: Sarathi-Serve), those of running sequences as those of newly admitted ones. Whose
turn it is, to start and to be computed, fairness.py says; inside a tenant, waiting.py and age.

What happens when blocks run out is always explicit: a waiting sequence goes on waiting and holds
nothing (starting.py); a running one takes the blocks of the latest request (running.py). Batch work
starts only if nothing interactive is short of room, and within its share (batch_work.py).
"""

from __future__ import annotations

from radixkv.cache import PrefixCache
from radixkv.service.engine.batch_work import BatchWork
from radixkv.service.engine.beams_running import check_beams, wake_beams
from radixkv.service.engine.counters import Counters
from radixkv.service.engine.fairness import Fairness
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.running import Running
from radixkv.service.engine.shares import Account, TenantShare
from radixkv.service.engine.starting import Starter
from radixkv.service.engine.swap import Swapper
from radixkv.service.engine.waiting import Waiting
from radixkv.service.engine.work import Plan, Work


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
        self.fairness = Fairness(quantum=max_batch_tokens)
        self.live = Running(
            cache,
            self.waiting,
            self.fairness,
            counters,
            max_num_seqs=max_num_seqs,
            lookahead_tokens=lookahead_tokens,
            swapper=swapper,
        )
        self.running = self.live.sequences
        batch_work = BatchWork(
            self.live,
            max_places=max(1, int(batch_share * max_num_seqs)),
            max_blocks=int(batch_share * cache.num_blocks),
            block_size=cache.block_size,
        )
        self._starter = Starter(
            cache, self.waiting, self.live, self.fairness, batch_work, share=share
        )
        self.hopeless = self._starter.hopeless
        """Those that never find room; whoever runs the steps tells them, and empties it."""
        self._max_batch_tokens = max_batch_tokens
        self._swapper = swapper
        # Of the last step: whose prompts were not all computed, and of whose none was.
        self._unfinished: list[Account] = []
        self._passed: list[Account] = []

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
        self.fairness.settle(self.waiting.beside, self._unfinished, self._passed)
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
        plan, go_on = Plan(self._max_batch_tokens), self.live.go_on
        for seq in [seq for seq in self.running if seq.remaining == 1]:
            if plan.budget == 0:
                break
            go_on(seq, plan)
        if len(plan.works) < len(self.running):
            for seq in self.running:
                if seq.remaining > 1:
                    plan.prompts.setdefault(seq.request.account, []).append(seq)
        if plan.budget and self.waiting:
            self._starter.start(plan)
        if plan.budget:
            self._add_prompts(plan)
        self._note_left(plan)
        return list(plan.works.values())

    def _add_prompts(self, plan: Plan) -> None:
        """Put prompts to work, tenant by tenant and by age, while there are tokens to give out."""
        first_to_end: Account | None = None
        for account in self.fairness.compute_order(plan.prompts):
            if first_to_end is not None and not self.fairness.lengthens(account, first_to_end):
                continue
            for seq in tuple(plan.prompts[account]):
                if plan.budget == 0:
                    return
                self.live.go_on(seq, plan)
                work = plan.works.get(seq)
                if work is not None:
                    account.held = 0
                    if first_to_end is None and work.reaches_end:
                        first_to_end = account

    def _note_left(self, plan: Plan) -> None:
        """See whose prompts the step leaves unfinished, and whom it passes."""
        self._unfinished, self._passed = [], []
        for account, prompts in plan.prompts.items():
            works = [plan.works.get(seq) for seq in prompts]
            if not all(work is not None and work.reaches_end for work in works):
                self._unfinished.append(account)
                if not any(works):
                    self._passed.append(account)

    def fork(self, request: Request, born: list[Sequence]) -> None:
        """Start ``born``, the other choices of ``request``, on the blocks of its first one."""
        self.live.fork(request, born)

    def wake(self, request: Request) -> None:
        """Start the beams of ``request`` that sleep, now that its first one is computed."""
        wake_beams(request, self.live, self.cache)

    def finish(self, seq: Sequence, *, publish: bool = True) -> None:
        """``seq`` is done, wherever it was: its blocks stay cached or become free."""
        if self._swapper is not None:
            self._swapper.forget(seq)
        if seq.request.asleep:
            self.forget_saved(seq.request)
            seq.request.asleep.clear()
        if seq.table is None:
            self.waiting.remove(seq)
        else:
            if publish:
                seq.publish(tail=True)
            self.live.stop(seq)
        account = seq.request.account
        if not account.num_waiting:
            account.passed = 0
        self.fairness.changed.add(account)
        seq.request.sequences.remove(seq)

    def forget_saved(self, request: Request) -> None:
        """Give up what host memory has of ``request``: it is of no use any more."""
        for seq in (*request.sequences, *request.asleep):
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
            everybody += [other for seq in everybody for other in seq.request.asleep]
            saved = sum(seq.saved.num_bytes for seq in everybody if seq.saved is not None)
            if saved != self._swapper.pool.used_bytes:
                wrong.append(
                    f"{self._swapper.pool.used_bytes} bytes of host memory are taken, {saved} used"
                )
        for request in {seq.request for seq in self.running if seq.request.beams is not None}:
            wrong += check_beams(request)
        if [seq.order for seq in self.running] != sorted(seq.order for seq in self.running):
            wrong.append("the running sequences are out of order")
        return wrong
