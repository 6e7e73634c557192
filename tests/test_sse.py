"""The wire format of event streams, on a bare server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from radixkv.service.http.sse import EventStream, encode_event, encode_json

Fill = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def served(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Serve one handler; yields its URL."""
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def received(fill: Fill) -> tuple[str, aiohttp.ClientResponse]:
    """What a client reads from a stream that ``fill`` writes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        async with EventStream(request, ping_s=60) as events:
            await fill(events)
        return events.response

    async with (
        served(handler) as url,
        aiohttp.ClientSession() as session,
        session.get(url) as reply,
    ):
        return await reply.text(), reply


async def test_an_answer_is_data_events_and_an_end_mark() -> None:
    async def fill(events: EventStream) -> None:
        await events.send({"a": 1})
        await events.done()

    text, reply = await received(fill)
    assert text == 'data: {"a":1}\n\ndata: [DONE]\n\n'
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"


async def test_an_error_ends_the_stream_without_end_mark_and_closes_the_connection() -> None:
    async def fill(events: EventStream) -> None:
        await events.send({"a": 1})
        await events.fail({"error": {"message": "no"}})

    text, reply = await received(fill)
    assert text.endswith('data: {"error":{"message":"no"}}\n\n')
    assert "[DONE]" not in text
    assert reply.connection is None or reply.connection.closed


async def test_while_nothing_happens_comments_keep_the_connection() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        async with EventStream(request, ping_s=0.01) as events:
            await heard.wait()
            await events.done()
        return events.response

    heard = asyncio.Event()
    async with (
        served(handler) as url,
        aiohttp.ClientSession() as session,
        session.get(url) as reply,
    ):
        for _ in range(3):
            assert await asyncio.wait_for(reply.content.readuntil(b"\n\n"), 10) == b": ping\n\n"
        heard.set()
        assert (await reply.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "text", ["a\nb\r\nc", "\u2028\u2029\x85", "\x0b\x0c\x1c\x1e", "héé 👋 日本"]
)
def test_an_event_is_one_line_by_every_definition_of_a_line(text: str) -> None:
    event = encode_event({"text": text}).decode()
    assert event.endswith("\n\n")
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": text}


def test_text_stays_readable_and_numbers_stay_json() -> None:
    assert encode_json({"t": "日本"}) == '{"t":"日本"}'
    with pytest.raises(ValueError):
        encode_json(float("nan"))
