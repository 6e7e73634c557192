"""Runs a batch: keeps some of its prompts in flight, in the order of the plan; writes what comes.

Knows tasks, answers and failures; which lines there are is source.py's to say, what may start
room.py's. Work is submitted as batch work: whatever else the engine is asked goes first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.errors import EngineDead, Overloaded
from radixkv.service.batch.asks import Ask, Asks
from radixkv.service.batch.plan import DEFAULT_MEMORY_BYTES, Plan, Step
from radixkv.service.batch.results import Done, ResultFile, error_record, response_record
from radixkv.service.batch.room import Flight, Room
from radixkv.service.batch.source import Source
from radixkv.service.batch.tally import BatchStopped, Tally
from radixkv.service.engine.params import Generation, Usage
from radixkv.service.http.errors import Loading, ShuttingDown
from radixkv.service.http.serving import Aborted
from radixkv.tokens import decode

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.stream import Stream

FLUSH_S = 0.25
"""Answers that are younger may be lost when the process is killed, and are computed again."""
_RETRY_S = 0.2
_GIVE_UP = (EngineDead, Loading, ShuttingDown, Aborted)
"""Nothing is wrong with the line: the batch ends here, and may be resumed."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A line of which not all prompts are answered."""

    ask: Ask
    left: int
    generations: dict[int, Generation] = field(default_factory=dict)
    failed: bool = False


class BatchRun:
    """One run over one file of requests. For one event loop; ``run`` is called once."""

    def __init__(
        self,
        engine: Engine,
        asks: Asks,
        source: Path,
        *,
        answers: ResultFile,
        errors: ResultFile | None = None,
        done: Done | None = None,
        url: str | None = None,
        share: float = 1.0,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> None:
        """``errors``: where refusals go; None: beside the answers. ``done``: what a run before had.

        ``url``: the only one that lines may name. ``share``: of the engine's places and blocks.
        ``on_usage`` is told of every prompt that was answered.
        """
        self.tally = Tally()
        self._engine, self._asks = engine, asks
        self._answers, self._errors = answers, errors if errors is not None else answers
        self._memory_bytes = memory_bytes
        self._on_usage = on_usage
        self._room = Room(engine.config, engine.stats().num_blocks, share)
        self._source = Source(
            source,
            asks,
            done=done or Done(),
            tally=self.tally,
            refuse=self._refuse,
            url=url,
        )
        self._pending: dict[int, _Pending] = {}
        self._flights: dict[asyncio.Task[None], Flight] = {}
        self._good: list[dict[str, Any]] = []
        self._bad: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._writing = threading.Lock()
        self._failure: BaseException | None = None

    async def run(self) -> Tally:
        """Answer every line that has no answer yet.

        Raises BatchStopped if the engine ends first, OSError if the disk does. However it ends,
        also when it is cancelled, all that was answered is written.
        """
        writer = asyncio.create_task(self._write_on())
        with Plan(memory_bytes=self._memory_bytes) as plan:
            try:
                await asyncio.to_thread(self._source.read, plan)
                self.tally.planned = await asyncio.to_thread(plan.totals)
                self.tally.reading = False
                async for ask, step in self._source.feed(plan):
                    await self._until(partial(self._room.may_start, step))
                    await self._start(ask, step)
                await self._until(lambda: not self._flights)
            finally:
                self._source.stopping = True
                await self._land()
                writer.cancel()
                await asyncio.wait([writer])
                self._flush()
        return self.tally

    # ---- in flight ------------------------------------------------------------------------------

    async def _start(self, ask: Ask, step: Step) -> None:
        prompt = step.prompt
        pending = self._pending.get(prompt.line)
        if pending is None:
            pending = self._pending[prompt.line] = _Pending(ask, ask.num_prompts)
        flight = self._room.plan(step)
        loop = asyncio.get_running_loop()

        def computed() -> None:
            flight.ready = True
            self._changed.set()

        def on_prompt() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(computed)

        stream: Stream | None = None
        while stream is None and not pending.failed:
            try:
                stream = self._engine.submit(
                    decode(prompt.tokens),
                    ask.params,
                    origin=ask.origin,
                    param=ask.param,
                    on_prompt=on_prompt,
                )
            except Overloaded:  # others fill the queue
                await asyncio.sleep(_RETRY_S)
            except _GIVE_UP as e:
                raise BatchStopped(str(e)) from e
            except Exception as e:
                self._fail(pending, e)
        if stream is None:
            self._room.pass_over(step)
            self._note_end(pending)
            return
        self._room.start(flight)
        task = asyncio.create_task(self._answer(pending, step, stream))
        self._flights[task] = flight
        task.add_done_callback(self._ended)

    async def _answer(self, pending: _Pending, step: Step, stream: Stream) -> None:
        try:
            generation = await stream.aresult()
            pending.generations[step.prompt.place] = generation
        except _GIVE_UP as e:
            raise BatchStopped(str(e)) from e
        except Exception as e:
            self._fail(pending, e)
        else:
            usage = generation.usage
            self.tally.prompt_tokens += usage.prompt_tokens
            self.tally.cached_tokens += usage.cached_tokens
            self.tally.completion_tokens += usage.completion_tokens
            if self._on_usage is not None:
                self._on_usage(usage)
        self._note_end(pending)

    def _note_end(self, pending: _Pending) -> None:
        """One more prompt of the line is over; with the last one the line is."""
        pending.left -= 1
        if pending.left:
            return
        ask = pending.ask
        del self._pending[ask.line.number]
        if pending.failed:
            return
        generations = [pending.generations[i] for i in range(ask.num_prompts)]
        try:
            body = self._asks.reply(ask, generations)
        except _GIVE_UP as e:
            raise BatchStopped(str(e)) from e
        except Exception as e:
            self._fail(pending, e)
            return
        self._good.append(response_record(ask.line.custom_id, 200, body))
        self.tally.answered += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._room.end(self._flights.pop(task))
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._changed.set()

    async def _until(self, true: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if true():
                return
            self._changed.clear()
            await self._changed.wait()

    async def _land(self) -> None:
        """Abort what is in flight and wait until it is."""
        for task in list(self._flights):
            task.cancel()
        while self._flights:
            await asyncio.wait(list(self._flights))
            await asyncio.sleep(0)  # their callbacks

    # ---- results --------------------------------------------------------------------------------

    def _fail(self, pending: _Pending, error: Exception) -> None:
        if not pending.failed:
            pending.failed = True
            self._refuse(error_record(pending.ask.line.custom_id, error))

    def _refuse(self, record: dict[str, Any]) -> None:
        self._bad.append(record)
        self.tally.refused += 1

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await asyncio.shield(asyncio.to_thread(self._flush))
            except OSError as e:
                self._failure = e
                self._changed.set()
                return

    def _flush(self) -> None:
        """Bring what there is to the disk. A line leaves its list when it is there."""
        with self._writing:
            if isinstance(self._failure, OSError):
                return  # what is behind half a line could not be read again
            # Refusals first: those of the plan were there before any answer, so they are on disk
            # before one, wherever a kill comes.
            for lines, file in ((self._bad, self._errors), (self._good, self._answers)):
                num = len(lines)
                file.append(lines[:num])
                del lines[:num]
