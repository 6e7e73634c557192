"""The engine thread: takes requests and commands, runs one step after another, hands out tokens.

One thread owns the model, the pool and the cache, so none of them needs a lock. Everything else
talks to it through an inbox; what it says goes out through each request's Stream.

A step:  inbox -> schedule -> forward -> commit + publish -> draw -> deltas -> outbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from radixkv.cache import PrefixCache
from radixkv.errors import EngineDead, NeverFits, RadixKVError
from radixkv.service.engine.admission import blocks_for
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.beams_steps import BeamSteps
from radixkv.service.engine.best import best_of, whole
from radixkv.service.engine.counters import Counters, EngineStats, TenantStats
from radixkv.service.engine.fairness import TenantShare
from radixkv.service.engine.inbox import Inbox
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.packing import pack
from radixkv.service.engine.params import Choice, Delta, Usage
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.sampling import ChoiceSampler, SampledToken, sample
from radixkv.service.engine.scheduler import Scheduler
from radixkv.service.engine.stopping import ChoiceStream
from radixkv.service.engine.stream import Outbox, Stream
from radixkv.service.engine.swap import BlockMover, Swapper

log = logging.getLogger("radixkv.engine")
T = TypeVar("T")


class Runner(BlockMover, Protocol):
    """What computes a step: a ModelRunner, or arithmetic in tests."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Do the batch's copies, write its tokens' KV, return [R, vocab] float32 logits."""
        ...


class EngineCore:
    """Runs requests to their end. ``make_choice(request, index)`` builds a choice's sampler and
    output; it is called on the engine thread when the prompt is computed."""

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        lookahead_tokens: int,
        share: bool,
        make_choice: Callable[[Request, int], tuple[ChoiceSampler, ChoiceStream]],
        batch_share: float = 0.75,
        swap_memory: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.counters = Counters()
        self._clock = clock
        self.swapper: Swapper | None = None
        if swap_memory:
            self.swapper = Swapper(runner, swap_memory, cache.block_size, self.counters, clock)
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            lookahead_tokens=lookahead_tokens,
            counters=self.counters,
            share=share,
            batch_share=batch_share,
            swapper=self.swapper,
        )
        cache.pins.on_expired = self.counters.observer.expired
        self.failure: BaseException | None = None
        self._make_choice = make_choice
        self._beams = BeamSteps(
            self.scheduler,
            self.counters,
            make_choice=make_choice,
            end=self._end_whole,
            fail=self._fail,
        )
        self._requests: dict[Stream, Request] = {}  # admitted to the scheduler and not finished
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._dead = False  # no step is made any more
        self._by_tenant: dict[str, TenantStats] = {}
        self.stats: EngineStats = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)

    # ---- called from any thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether steps are still being made."""
        return self._thread.is_alive() and self.failure is None

    def submit(self, request: Request) -> None:
        """Hand over a request; its Stream gets an EngineDead if the engine ends before it does."""
        self._send(lambda: self._add(request), otherwise=request.stream)

    def abort(self, stream: Stream) -> None:
        """Drop a request within one step, wherever it is."""
        self._send(lambda: self._end(stream, "abort"))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._dead:
                    raise self._death()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self._inbox.put(run):
            future.set_exception(self._death())
        return future

    def set_tenant(self, tenant: str, share: TenantShare) -> None:
        """Give a tenant another share, within one step."""
        self._send(lambda: self.scheduler.set_share(tenant, share))

    def note_refused(self, origin: Origin) -> None:
        """A request was refused for a full queue; the counts show it within one step."""
        self._send(lambda: self._count_refused(origin))

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what runs and end the thread; idempotent."""
        self._inbox.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _send(self, message: Callable[[], None], otherwise: Stream | None = None) -> None:
        if not self._inbox.put(message) and otherwise is not None:
            raise self._death()

    def _death(self) -> EngineDead:
        if self.failure is None:
            return EngineDead("the engine is closed")
        # What failed is for the log and for callers in this process, not for clients over HTTP.
        error = EngineDead("the engine has failed and must be started again")
        error.__cause__ = self.failure
        return error

    # ---- the engine thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._inbox.wait(self._busy):
                    self.turn()
        except BaseException as error:  # whatever it is, nobody may wait in silence (ERRORS-3)
            log.exception("the engine thread failed")
            self.failure = error
        finally:
            self._inbox.close()
            self._bury()

    def _busy(self) -> bool:
        return not self.scheduler.idle

    def turn(self) -> None:
        """Read the inbox, make one step if anything runs or waits, and tell the consumers."""
        self._inbox.read()
        if not self.scheduler.idle:
            self.step()
            if self.scheduler.idle:
                self._check_at_rest()
        self.counters.observer.step(self.cache, idle=self.scheduler.idle)
        self.stats = self._snapshot()
        self._outbox.flush()

    def step(self) -> None:
        """Compute one batch, draw tokens where sequences reached their end, and say so."""
        planned = self.scheduler.schedule()
        for seq in self.scheduler.hopeless:
            request = seq.request
            need = blocks_for(seq.num_tokens, self.cache.block_size)
            room = self.cache.available_to(request.identity.namespace.tenant)
            self._fail(request, NeverFits(need_blocks=need, capacity_blocks=room))
        self.scheduler.hopeless.clear()
        if not planned:
            return
        began_s = self._clock()
        works, batch, num_rows = pack(planned)
        logits = self.runner.forward(batch)
        counters, changed = self.counters, self.scheduler.fairness.changed
        block_size = self.cache.block_size
        counters.note_step(batch.num_tokens)
        row = prompt_tokens = 0
        rows: list[int] = []
        drawing: list[Sequence] = []
        beams: list[tuple[int, Sequence]] = []
        for work, wanted in zip(works, num_rows, strict=True):
            seq, table, num_tokens = work.seq, work.table, work.num_tokens
            request, start = seq.request, table.num_tokens
            stop = start + num_tokens
            if num_tokens > 1:
                prompt_tokens += num_tokens
            table.commit(num_tokens)
            shares = request.beams is None or start < seq.publishes_to
            counters.note_computed(seq, start, stop)
            changed.add(request.account)
            if shares and (start // block_size != stop // block_size or work.ends_public):
                seq.publish()
            prompt_logprobs = request.prompt_logprobs
            if prompt_logprobs is not None and request.stream.prompt_logprobs is None:
                prompt_logprobs.add(start, logits[row : row + wanted])
                if prompt_logprobs.complete:  # at once, where the prompt is a single token
                    request.stream.prompt_logprobs = prompt_logprobs.result()
            row += wanted
            if work.reaches_end and request.beams is not None:
                beams.append((row - 1, seq))
            elif work.reaches_end:
                rows.append(row - 1)
                drawing.append(seq)
                if not request.forked:
                    for choice in self._fork(request):
                        rows.append(row - 1)
                        drawing.append(choice)
        tokens: list[SampledToken] = []
        if drawing:
            picked = logits if rows == list(range(logits.shape[0])) else logits[rows]
            tokens = sample(picked, [seq.sampler for seq in drawing])
        if self.swapper is not None:
            self.swapper.note_step(
                prompt_tokens,
                batch.num_tokens,
                self._clock() - began_s,
                ended=bool(drawing or beams),
            )
        for seq, token in zip(drawing, tokens, strict=True):
            self._advance(seq, token)
        if beams:
            self._beams.take(logits, beams, works)

    def _add(self, request: Request) -> None:
        self._requests[request.stream] = request
        self.counters.requests += 1
        if self._dead:
            self._fail(request, self._death())
            return
        request.identity = request.identify()
        request.sequences.append(self._choice(request, 0))
        self._beams.begin(request)
        self.scheduler.add(request.sequences[0])

    def _count_refused(self, origin: Origin) -> None:
        self.counters.rejected += 1
        account = self.scheduler.fairness.account(origin.tenant, origin.batch)
        account.rejected += 1
        self.scheduler.fairness.changed.add(account)

    def _choice(self, request: Request, index: int) -> Sequence:
        sampler, output = self._make_choice(request, index)
        return Sequence(
            request,
            index,
            sampler,
            output,
            tokens=bytearray(request.prompt_bytes),
            ids=list(request.prompt_ids),
        )

    def _fork(self, request: Request) -> list[Sequence]:
        if request.on_prompt is not None:
            request.on_prompt(request.sequences[0])
        born = [self._choice(request, i) for i in range(1, request.params.num_sequences)]
        self.scheduler.fork(request, born)
        return born

    def _advance(self, seq: Sequence, token: SampledToken) -> None:
        """Give ``seq`` its next token and its consumer what can be said of it."""
        request, stream = seq.request, seq.request.stream
        if token.error is not None:
            error = token.error
            self._fail(request, RadixKVError(error) if isinstance(error, str) else error)
        if stream.finished:  # failed, perhaps through a sibling in this very step
            return
        seq.append(token.token_id)
        request.completion_tokens += 1
        request.account.generation_tokens += 1
        self.counters.generation_tokens += 1
        if stream.first_token_s is None:
            stream.first_token_s = time.monotonic()
        self._update_usage(request)
        delta = seq.output.push(token)
        if request.params.selects:
            assert token.logprob is not None, "drawn for a request that selects"
            seq.total += token.logprob
            delta = None  # it may not be among those that are returned
        if seq.output.finished:
            self.scheduler.finish(seq)
            self._close_choice(seq)
        if delta is not None:
            self._outbox.put(stream, delta)

    def _close_choice(self, seq: Sequence) -> None:
        """Record a finished choice; with the last one the request is over."""
        request, choice = seq.request, seq.output.choice()
        if request.params.selects:
            request.drawn.append((seq, choice))
            if not request.sequences:
                self._end_whole(request, best_of(request))
            return
        request.stream._choices[seq.index] = choice
        if request.on_choice is not None:
            request.on_choice(seq)
        if not request.sequences:
            self.counters.finished[choice.finish_reason] += 1
            self._forget(request)

    def _end_whole(self, request: Request, choices: list[Choice]) -> None:
        """A request is over that says nothing before its end."""
        self.counters.finished[choices[0].finish_reason] += 1
        for choice in choices:
            request.stream._choices[choice.index] = choice
        self._forget(request)
        for choice in choices:
            self._outbox.put(request.stream, whole(choice))

    def _end(self, stream: Stream, reason: str) -> None:
        """Abort: every choice that is not finished ends here and its blocks are let go."""
        request = self._requests.get(stream)
        if request is None:  # it has ended by itself in the meantime
            return
        for seq in list(request.sequences):
            self.scheduler.finish(seq, publish=request.beams is None)
            if request.beams is not None or request.params.selects:
                continue
            self._finish_output(request, seq.output, seq.index)
            if request.on_choice is not None:
                request.on_choice(seq)
        for index in range(request.params.n):
            if index not in stream._choices:  # never born, or not selected
                self._finish_output(request, self._make_choice(request, index)[1], index)
        self.counters.finished[reason] += 1
        self._forget(request)

    def _finish_output(self, request: Request, output: ChoiceStream, index: int) -> None:
        delta: Delta = output.end("abort")
        request.stream._choices[index] = output.choice()
        self._outbox.put(request.stream, delta)

    def _fail(self, request: Request, error: BaseException) -> None:
        """One request cannot go on; the others do."""
        if request.stream.finished:
            return
        for seq in list(request.sequences):
            self.scheduler.finish(seq, publish=False)
        self.counters.failed += 1
        self._forget(request)
        self._outbox.put(request.stream, error)

    def _forget(self, request: Request) -> None:
        self._update_usage(request)
        self.counters.observer.finished(request)
        request.stream._finish()
        self._requests.pop(request.stream, None)

    def _update_usage(self, request: Request) -> None:
        request.stream.usage = Usage(
            len(request.prompt_ids), request.completion_tokens, request.cached_tokens or 0
        )

    def _check_at_rest(self) -> None:
        """With nothing running every block must be free, cached or pinned; O(1)."""
        stats, pinned = self.cache.stats(), self.cache.pins.num_blocks
        if self.swapper is not None and self.swapper.pool.used_bytes:
            self.report([f"at rest {self.swapper.pool.used_bytes} bytes of host memory are taken"])
        if stats.free_blocks + stats.evictable_blocks + pinned != stats.num_blocks:
            self.report(
                [
                    f"at rest {stats.free_blocks} blocks are free, {stats.evictable_blocks} cached "
                    f"and {pinned} pinned, of {stats.num_blocks}"
                ]
            )

    def weights_changed(self) -> None:
        """What the running requests have computed belongs to no identity from now on (ADMIN-2).

        Those that hold nothing start with the new weights, and so under their identity.
        """
        for request in self._requests.values():
            request.may_publish = all(seq.table is None for seq in request.sequences)
            if request.may_publish:
                request.identity = request.identify()
                self.scheduler.forget_saved(request)

    def report(self, violations: list[str]) -> None:
        """A broken invariant is counted and logged; it does not stop the service (LEAK-2)."""
        self.counters.violations += len(violations)
        for line in violations:
            log.error("broken invariant: %s", line)

    def _snapshot(self) -> EngineStats:
        scheduler = self.scheduler
        changed = scheduler.settle()
        if changed:
            shown = self._by_tenant.copy()  # who has the last snapshot keeps it as it was
            for tenant in changed:
                shown[tenant] = TenantStats.of(scheduler.fairness.of(tenant))
            self._by_tenant = shown
        host = self.swapper.pool if self.swapper is not None else None
        return self.counters.snapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache=self.cache.stats(),
            pinned_blocks=self.cache.pins.num_blocks,
            by_tenant=self._by_tenant,
            swap_used_bytes=0 if host is None else host.used_bytes,
            swap_capacity_bytes=0 if host is None else host.capacity_bytes,
        )

    def in_flight(self) -> list[Request]:
        """Return the requests that were submitted and are not over. From any thread."""
        return [*self._requests.values()]

    def clear_counters(self) -> None:
        """Begin again from 0, as if nothing had been asked yet. For an engine at rest."""
        self.cache.clear_counters()
        self.counters.clear()
        self.scheduler.fairness.clear()
        self._by_tenant = {}

    def check(self) -> list[str]:
        """Return each broken invariant in words, and count and log it. O(blocks)."""
        found = self.cache.check() + self.scheduler.check()
        self.report(found)
        return found

    def _bury(self) -> None:
        """Tell everybody who still waits; the thread is about to end."""
        self._dead = True
        self._inbox.read()
        for request in list(self._requests.values()):
            self._forget(request)
            self._outbox.put(request.stream, self._death())
        self._outbox.flush()
