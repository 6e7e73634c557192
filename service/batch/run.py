"""Runs a batch: plans it, keeps a bounded number of its prompts in flight, writes what comes.

Knows order, room and results; nothing of HTTP routes, terminals or databases. A prompt is submitted
when the prefix that it shares with those before it is computed and can be found, so each prefix is
computed once; the next one of the order waits for that, and does not go ahead. Work is submitted as
batch work: whatever else the engine is asked goes first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from radixkv.errors import EngineDead, Overloaded, RadixKVError
from radixkv.service.batch.asks import Ask, Asks
from radixkv.service.batch.lines import LineFault, line_at, read_lines
from radixkv.service.batch.plan import DEFAULT_MEMORY_BYTES, Plan, Step, Totals
from radixkv.service.batch.results import (
    Done,
    ResultFile,
    digest,
    fault_record,
    response_record,
)
from radixkv.service.engine.params import Generation, Usage
from radixkv.service.http.errors import Loading, ShuttingDown, describe, log_bug
from radixkv.service.http.serving import Aborted
from radixkv.tokens import decode

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.stream import Stream

FLUSH_S = 0.25
"""Answers that are younger may be lost when the process is killed, and are computed again."""
_READ_AHEAD = 16
_KNOWN_ASKS = 64
_RETRY_S = 0.2
_GIVE_UP = (EngineDead, Loading, ShuttingDown, Aborted)
"""Nothing is wrong with the line: the batch ends here, and may be resumed."""


class BatchStopped(RadixKVError):
    """The batch cannot go on now; what was answered is on disk."""

    status = 503
    code = "batch_stopped"


@dataclass(slots=True)
class Tally:
    """How far a batch is. Written on the event loop, read by anyone."""

    lines: int = 0
    """All of the file, once it is read."""
    skipped: int = 0
    """Those that a run before had answered."""
    answered: int = 0
    refused: int = 0
    """Those that got an error."""
    planned: Totals = field(default_factory=Totals)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reading: bool = True
    began_s: float = field(default_factory=time.monotonic)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found in the cache."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def finished(self) -> int:
        """Lines that have their result, those of a run before included."""
        return self.skipped + self.answered + self.refused


@dataclass(slots=True, eq=False)
class _Flight:
    """One prompt from its submission to its end."""

    step: Step
    beside_tokens: int
    """What it shares with the one in flight before it."""
    growth_tokens: int
    ready: bool = False
    """Its whole prompt can be found in the cache, or never will be."""


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
        max_lines: int | None = None,
        share: float = 1.0,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> None:
        """``errors``: where refusals go; None: beside the answers. ``done``: what a run before had.

        ``url``: the only one that lines may name. ``share``: of the engine's places and blocks.
        ``max_lines``: more are refused, each. ``on_usage`` is told of every prompt that ended.
        """
        self.tally = Tally()
        self._engine, self._asks, self._source = engine, asks, source
        self._answers, self._errors = answers, errors if errors is not None else answers
        self._done = done or Done()
        self._url, self._max_lines = url, max_lines
        self._memory_bytes = memory_bytes
        self._on_usage = on_usage
        config, stats = engine.config, engine.stats()
        self._max_choices = max(1, int(share * config.max_num_seqs))
        self._pool_tokens = int(share * stats.num_blocks * config.block_size)
        self._lookahead = max(config.lookahead_tokens, config.block_size)
        self._block_size = config.block_size
        self._known: OrderedDict[int, Ask] = OrderedDict()
        self._pending: dict[int, _Pending] = {}
        self._flights: dict[asyncio.Task[None], _Flight] = {}
        self._order: list[_Flight] = []  # in the order of the plan
        self._since = 0
        """The longest prefix of the last in flight that what comes next may share."""
        self._choices = 0
        self._path: list[tuple[int, _Flight]] = []
        self._good: list[dict[str, Any]] = []
        self._bad: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._writing = threading.Lock()
        self._failure: BaseException | None = None
        self._stopping = False

    async def run(self) -> Tally:
        """Answer every line that has no answer yet.

        Raises BatchStopped if the engine ends first, OSError if the disk does. However it ends,
        also when it is cancelled, all that was answered is written.
        """
        writer = asyncio.create_task(self._write_on())
        with Plan(memory_bytes=self._memory_bytes) as plan:
            try:
                await asyncio.to_thread(self._read, plan)
                self.tally.planned = await asyncio.to_thread(plan.totals)
                self.tally.reading = False
                async for ask, step in self._feed(plan):
                    await self._until(partial(self._may_start, step))
                    await self._start(ask, step)
                await self._until(lambda: not self._flights)
            finally:
                self._stopping = True
                await self._land()
                writer.cancel()
                await asyncio.wait([writer])
                self._flush()
        return self.tally

    # ---- reading --------------------------------------------------------------------------------

    def _read(self, plan: Plan) -> None:
        """Plan what there is to do, and refuse what is no request. Runs in a thread."""
        tally, seen = self.tally, set[bytes]()
        with self._source.open("rb") as file:
            for item in read_lines(file):
                if self._stopping:
                    return
                tally.lines += 1
                try:
                    if isinstance(item, LineFault):
                        if item.custom_id is not None:
                            seen.add(digest(item.custom_id))
                        raise item
                    self._check_line(item.custom_id, item.number, item.url, seen)
                except LineFault as fault:
                    if self._done.has_fault(fault.number):
                        tally.skipped += 1
                    else:
                        self._refuse(fault_record(fault))
                    continue
                if self._done.has(item.custom_id):
                    tally.skipped += 1
                    continue
                try:
                    for prompt in self._asks.prompts(self._asks.parse(item)):
                        plan.add(prompt)
                except Exception as e:
                    self._refuse(_error_record(item.custom_id, e))

    def _check_line(self, custom_id: str, number: int, url: str, seen: set[bytes]) -> None:
        name = digest(custom_id)
        if name in seen:
            raise LineFault(
                number,
                "duplicate_custom_id",
                f"custom_id {custom_id[:80]!r} was used by a line before",
                custom_id=custom_id,
            )
        seen.add(name)
        if self._url is not None and url != self._url:
            raise LineFault(
                number,
                "mismatched_url",
                f"url is {url!r}; the batch's endpoint is {self._url!r}",
                custom_id=custom_id,
            )
        if self._max_lines is not None and self.tally.lines > self._max_lines:
            raise LineFault(
                number,
                "too_many_lines",
                f"a batch has at most {self._max_lines} lines",
                custom_id=custom_id,
            )

    async def _feed(self, plan: Plan) -> AsyncIterator[tuple[Ask, Step]]:
        """Yield the steps of the plan with their lines, read once more from the file."""
        with self._source.open("rb") as file:
            steps, refused = iter(plan), set[int]()
            while chunk := await asyncio.to_thread(self._next_asks, steps, file):
                for ask, step in chunk:
                    if isinstance(ask, Ask):
                        yield ask, step
                    elif step.prompt.line not in refused:  # such as one of an adapter that is gone
                        refused.add(step.prompt.line)
                        self._refuse(ask)

    def _next_asks(
        self, steps: Iterator[Step], file: BinaryIO
    ) -> list[tuple[Ask | dict[str, Any], Step]]:
        found: list[tuple[Ask | dict[str, Any], Step]] = []
        for step in islice(steps, _READ_AHEAD):
            number = step.prompt.line
            ask = self._known.get(number)
            if ask is None:
                try:
                    line = line_at(file, number, step.prompt.offset)
                except LineFault as fault:
                    raise BatchStopped(f"{self._source} was changed: {fault}") from None
                try:
                    ask = self._known[number] = self._asks.parse(line)
                except RadixKVError as e:
                    found.append((_error_record(line.custom_id, e), step))
                    continue
                if len(self._known) > _KNOWN_ASKS:
                    self._known.popitem(last=False)
            found.append((ask, step))
        return found

    # ---- in flight ------------------------------------------------------------------------------

    def _may_start(self, step: Step) -> bool:
        """Whether its prefix is there, and room for the rest."""
        provider = self._provider(step.shared_tokens)
        if provider is not None and not provider.ready:
            return False
        if not self._order:
            return True
        own = step.prompt.num_tokens - self._beside(step) + self._growth(step)
        return (
            self._choices + step.prompt.choices <= self._max_choices
            and self._room_taken() + own <= self._pool_tokens
        )

    def _provider(self, shared_tokens: int) -> _Flight | None:
        """Return what computes the last of the first ``shared_tokens``; cut the path to those.

        path    end 3: A    end 5: B    end 9: C        what shares 4 waits for B, and B is ready
                |--A--|      |-B-|       |--C--|        only after A
        """
        path = self._path
        while path and (path[-2][0] if len(path) > 1 else 0) >= shared_tokens:
            path.pop()
        return path[-1][1] if path else None

    def _beside(self, step: Step) -> int:
        """Return the tokens that it shares with those in flight."""
        return min(self._since, step.shared_tokens) if self._order else 0

    def _growth(self, step: Step) -> int:
        """Tokens of the pool that it will soon hold beyond its prompt: answers, and in each choice
        a copy of the block in which the prompt ends."""
        choices = step.prompt.choices
        answer_tokens = min(step.prompt.answer_tokens // choices, self._lookahead)
        return choices * (answer_tokens + 2 * self._block_size)

    def _room_taken(self) -> int:
        """Tokens that those in flight hold, or soon will: the edges of the tree of their prompts,
        and what grows below."""
        return sum(
            flight.step.prompt.num_tokens - flight.beside_tokens + flight.growth_tokens
            for flight in self._order
        )

    async def _start(self, ask: Ask, step: Step) -> None:
        prompt = step.prompt
        pending = self._pending.get(prompt.line)
        if pending is None:
            pending = self._pending[prompt.line] = _Pending(ask, ask.num_prompts)
        flight = _Flight(step, self._beside(step), self._growth(step))
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
            self._since = min(self._since, step.shared_tokens)
            self._note_end(pending)
            return
        if self._path:
            self._path[-1] = (step.shared_tokens, self._path[-1][1])
        self._path.append((prompt.num_tokens, flight))
        self._choices += prompt.choices
        self._order.append(flight)
        self._since = prompt.num_tokens
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
        flight = self._flights.pop(task)
        flight.ready = True
        self._choices -= flight.step.prompt.choices
        at = self._order.index(flight)
        del self._order[at]
        if at < len(self._order):
            behind = self._order[at]
            behind.beside_tokens = min(behind.beside_tokens, flight.beside_tokens)
        else:
            self._since = min(self._since, flight.beside_tokens)
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
            self._refuse(_error_record(pending.ask.line.custom_id, error))

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
            for lines, file in ((self._good, self._answers), (self._bad, self._errors)):
                num = len(lines)
                file.append(lines[:num])
                del lines[:num]


def _error_record(custom_id: str, error: Exception) -> dict[str, Any]:
    status, body, _ = describe(error, custom_id)
    if status == 500:
        log_bug(custom_id)
    return response_record(custom_id, status, body)
