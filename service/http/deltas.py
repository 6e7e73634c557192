"""From the engine's deltas to events: several prompts read as one, and errors inside a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.service.engine.params import Delta, FinishReason, Generation
from radixkv.service.http.errors import describe, error_code, log_bug, shaped
from radixkv.service.http.observe import line_of
from radixkv.service.http.replies import FinishWord
from radixkv.service.http.serving import Aborted, Serving
from radixkv.service.http.sse import EventStream
from radixkv.service.metrics import Metrics

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream


def finish_word(reason: FinishReason, *, calls: int = 0) -> FinishWord:
    """Return OpenAI's word for the end of an answer with so many complete calls in it.

    An aborted answer is no answer, so that raises Aborted.
    """
    if reason == "abort":
        raise Aborted
    return "tool_calls" if calls and reason == "stop" else reason


async def deltas_of(
    streams: Sequence[Stream], metrics: Metrics
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index, delta) of all streams as they come; choice i of stream s has index s * n + i.

    Raises what the first failing stream raises. The caller aborts what is left, as
    ``Serving.running`` does.
    """
    seen_s: dict[int, float] = {}
    async with aclosing(_merged(streams)) as deltas:
        async for which, delta in deltas:
            index = which * streams[0].num_choices + delta.index
            if delta.token_ids:
                now = time.monotonic()
                if index in seen_s:
                    metrics.observe_gap(now - seen_s[index])
                seen_s[index] = now
            if delta.finish_reason is not None:
                finish_word(delta.finish_reason)
            yield index, delta


async def send_events(
    request: web.Request,
    serving: Serving,
    send: Callable[[EventStream], Awaitable[None]],
    dialect: type[EventStream] = EventStream,
) -> web.StreamResponse:
    """Open the event stream, let ``send`` fill it, and end it: with its end mark, or an error."""
    async with dialect(request, ping_s=serving.ping_s) as events:
        try:
            await send(events)
            await events.done()
        except ConnectionError:
            raise
        except Exception as e:
            line = line_of(request)
            status, body, _ = describe(e, line.id)
            line.error = error_code(e)
            if status == 500:
                log_bug(line.id)
            await events.fail(shaped(request, status, body))
    return events.response


async def gather(streams: Sequence[Stream]) -> list[Generation]:
    """Wait for all; the first that fails fails them all."""
    if len(streams) == 1:
        return [await streams[0].aresult()]
    return await asyncio.gather(*(stream.aresult() for stream in streams))


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def read(which: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((which, delta))
            queue.put_nowait((which, None))
        except Exception as e:
            queue.put_nowait((which, e))

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            which, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield which, item
    finally:
        for reader in readers:
            reader.cancel()
