"""The way of tokens from the engine thread to one caller, who may be a thread or a coroutine.

Knows queues and wake-ups; nothing of scheduling or tensors.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from radixkv.service.engine.keep import Kept
from radixkv.service.engine.lookups import Lookup
from radixkv.service.engine.params import Choice, Delta, Generation, TokenLogprob, Usage

if TYPE_CHECKING:
    from radixkv.service.engine.beams_group import BeamGroup
    from radixkv.service.engine.explaining import Explained


class Stream:
    """The answer to one request, as it is made: iterate it (``for`` or ``async for``) for deltas.

    The iteration ends after every choice has had its ``finish_reason``. An engine failure is raised
    out of it. Leaving it early, or cancelling it, aborts the request. One consumer at a time.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        num_choices: int,
        *,
        deterministic: bool = False,
        abort: Callable[[Stream], None],
        done: Callable[[int], None],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.num_choices = num_choices
        self.deterministic = deterministic
        self.usage = Usage(len(self.prompt_token_ids), 0, 0)
        self.lookups: list[Lookup] = []
        """What each admission found; written by the engine thread, at most MAX_LOOKUPS."""
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.kept: tuple[Kept, ...] = ()
        self.explain = False
        self.explained: Explained | None = None
        """Why not all of the prompt was cached, as of its admission; only if ``explain`` is set."""
        self.beams: BeamGroup | None = None
        """How its beam search goes, if it is one; written by the engine thread."""
        self.arrived_s = time.monotonic()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._abort = abort
        self._done = done
        self._choices: dict[int, Choice] = {}
        self._items: deque[Delta | BaseException] = deque()
        self._open_choices = num_choices  # as seen by the consumer
        self._error: BaseException | None = None  # that it was told
        self._ready = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the engine is done with this request, well or badly."""
        return self.finished_s is not None

    def abort(self) -> None:
        """Ask the engine to drop the request; it does within one step. Harmless when finished."""
        if not self.finished:
            self._abort(self)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self._open_choices:
                with self._ready:
                    while not self._items:
                        self._ready.wait()
                yield self._take()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        self._loop = asyncio.get_running_loop()
        try:
            while self._open_choices:
                # `_loop` is set before `_items` is looked at, and the engine appends before it
                # looks at `_loop`: whichever comes first, the item is seen.
                while not self._items:
                    self._waiter = self._loop.create_future()
                    if self._items:
                        break
                    await self._waiter
                yield self._take()
        finally:
            self.abort()

    def result(self) -> Generation:
        """Wait for the whole answer. Raises EngineDead if the engine dies first."""
        for _ in self:
            pass
        return self._generation()

    async def aresult(self) -> Generation:
        """Wait for the whole answer without blocking the loop; a cancelled wait aborts."""
        async for _ in self:
            pass
        return self._generation()

    def _finish(self) -> None:
        """The engine is done with the request; called once, on its thread."""
        self.finished_s = time.monotonic()
        self._done(self.num_choices)

    def _generation(self) -> Generation:
        if self._error is not None:  # told before, to whoever asked first
            raise self._error
        return Generation(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            choices=tuple(self._choices[i] for i in sorted(self._choices)),
            usage=self.usage,
            prompt_logprobs=self.prompt_logprobs,
            deterministic=self.deterministic,
            kept=self.kept,
        )

    def _take(self) -> Delta:
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self._open_choices, self._error = 0, item
            raise item
        if item.finish_reason is not None:
            self._open_choices -= 1
        return item

    def _wake(self) -> None:
        """Runs on the consumer's loop."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Outbox:
    """Collects what one step says and wakes each waiting loop once, not once a token.

    Used by the engine thread only.
    """

    def __init__(self) -> None:
        self._by_loop: defaultdict[asyncio.AbstractEventLoop, list[Stream]] = defaultdict(list)
        self._threads: list[Stream] = []

    def put(self, stream: Stream, item: Delta | BaseException) -> None:
        """Hand ``item`` to the stream; its consumer wakes at the next ``flush``."""
        stream._items.append(item)
        if stream._loop is not None:
            self._by_loop[stream._loop].append(stream)
        else:
            self._threads.append(stream)

    def flush(self) -> None:
        """Wake every consumer that was given something."""
        for stream in self._threads:
            with stream._ready:
                stream._ready.notify_all()
            if stream._loop is not None:  # it began to listen between put and flush
                self._by_loop[stream._loop].append(stream)
        self._threads.clear()
        for loop, streams in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, streams)
            except RuntimeError:  # the loop was closed: nobody listens any more
                for stream in streams:
                    stream.abort()
        self._by_loop.clear()


def _wake_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream._wake()
