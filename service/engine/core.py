"""The engine thread: takes requests and commands, runs one step after another, hands out tokens.

One thread owns the model, the pool and the cache, so none of them needs a lock. Everything else
talks to it through an inbox; what it says goes out through each request's Stream. What becomes of a
request answering.py knows, what is counted and proved books.py.

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
from radixkv.errors import EngineDead, NeverFits
from radixkv.service.engine.admission import blocks_for
from radixkv.service.engine.answering import Answering
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.beams_steps import BeamSteps
from radixkv.service.engine.books import Books
from radixkv.service.engine.counters import Counters, EngineStats
from radixkv.service.engine.inbox import Inbox
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.packing import pack
from radixkv.service.engine.rates import PrefillRate
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.sampling import ChoiceSampler, SampledToken, sample
from radixkv.service.engine.scheduler import Scheduler
from radixkv.service.engine.shares import TenantShare
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
        self._prefill_rate = PrefillRate()
        self._idle_since_s: float | None = None
        self.swapper: Swapper | None = None
        if swap_memory:
            self.swapper = Swapper(
                runner, swap_memory, cache.block_size, self.counters, clock, self._prefill_rate
            )
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
        self._outbox = Outbox()
        self._answering = Answering(
            self.scheduler, self.counters, self._outbox, make_choice=make_choice
        )
        self._beams = BeamSteps(
            self.scheduler,
            self.counters,
            make_choice=make_choice,
            end=self._answering.end_whole,
            fail=self._answering.fail,
        )
        self._inbox = Inbox()
        self._dead = False  # no step is made any more
        self._books = Books(cache, self.scheduler, self.counters, self.swapper)
        self.stats: EngineStats = self._books.snapshot()
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
        if not self._inbox.put(lambda: self._add(request)):
            raise self._death()

    def abort(self, stream: Stream) -> None:
        """Drop a request within one step, wherever it is."""
        self._send(lambda: self._answering.abort(stream))

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
        self._send(lambda: self._books.count_refused(origin))

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what runs and end the thread; idempotent."""
        self._inbox.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _send(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)  # to an engine that has ended it makes no difference

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
        busy = not self.scheduler.idle
        self._inbox.read()
        if not self.scheduler.idle:
            busy = True
            self.step()
        if busy and self.scheduler.idle:  # also where all that ran was aborted
            self._books.check_at_rest()
            self._idle_since_s = self._clock()
        self.cache.tick()
        self.counters.observer.step(self.cache, idle=self.scheduler.idle)
        self.stats = self._books.snapshot()
        self._outbox.flush()

    def step(self) -> None:
        """Compute one batch, draw tokens where sequences reached their end, and say so."""
        if self._idle_since_s is not None:
            idle_s = self._clock() - self._idle_since_s
            self.scheduler.fairness.rest(self._prefill_rate.amount(idle_s))
            self._idle_since_s = None
        planned = self.scheduler.schedule()
        for seq in self.scheduler.hopeless:
            request = seq.request
            need = blocks_for(seq.num_tokens, self.cache.block_size)
            room = self.cache.available_to(request.identity.namespace.tenant)
            self._answering.fail(request, NeverFits(need_blocks=need, capacity_blocks=room))
        if self.scheduler.hopeless:
            self.scheduler.hopeless.clear()
            planned = [work for work in planned if work.seq.table is not None]  # their siblings'
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
                    for choice in self._answering.fork(request):
                        rows.append(row - 1)
                        drawing.append(choice)
        tokens: list[SampledToken] = []
        if drawing:
            picked = logits if rows == list(range(logits.shape[0])) else logits[rows]
            tokens = sample(picked, [seq.sampler for seq in drawing])
        self._prefill_rate.note_step(
            prompt_tokens,
            batch.num_tokens,
            self._clock() - began_s,
            ended=bool(drawing or beams),
        )
        for seq, token in zip(drawing, tokens, strict=True):
            self._answering.advance(seq, token)
        if beams:
            self._beams.take(logits, beams, works)

    def _add(self, request: Request) -> None:
        self._answering.take(request)
        if self._dead:
            self._answering.fail(request, self._death())
            return
        self._answering.begin(request)
        self._beams.begin(request)
        self.scheduler.add(request.sequences[0])

    def _bury(self) -> None:
        """Tell everybody who still waits; the thread is about to end."""
        self._dead = True
        while True:
            try:
                self._inbox.read()
                break
            except BaseException:  # one message; those behind it are read all the same
                log.exception("a message to the engine failed while it ended")
        self._answering.abandon(self._death)
        self._outbox.flush()

    def weights_changed(self) -> None:
        """Let nobody share what running requests have computed with the old weights (ADMIN-2)."""
        self._answering.weights_changed()

    def in_flight(self) -> list[Request]:
        """Return the requests that were submitted and are not over. From any thread."""
        return self._answering.in_flight()

    def clear_counters(self) -> None:
        """Begin again from 0, as if nothing had been asked yet. For an engine at rest."""
        self._books.clear()

    def check(self) -> list[str]:
        """Return each broken invariant in words, and count and log it. O(blocks)."""
        return self._books.check()
