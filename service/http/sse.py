"""Server-sent events on one response: data, pings while nothing happens, an end.

Knows the wire format; nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
import json
import re
from types import TracebackType
from typing import Any, Self

from aiohttp import web

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
# JSON allows these raw, but clients that split lines as Python's splitlines() does would cut there.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def encode_json(value: object) -> str:
    """Return compact JSON, never more than one line, with text left readable."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _LINE_ENDS.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def json_reply(value: object) -> web.Response:
    """Return a JSON answer that is not streamed."""
    return web.Response(text=encode_json(value), content_type="application/json")


def encode_event(value: object) -> bytes:
    """Return one ``data:`` event."""
    return f"data: {encode_json(value)}\n\n".encode()


class EventStream:
    """The events of one answer. Writing waits while the client reads slower than we write.

    A comment is written whenever ``ping_s`` passed without an event, so that proxies keep the
    connection and a client that vanished is noticed. The form of events is OpenAI's; another
    dialect is a subclass that says otherwise.
    """

    ping = PING
    """What is written while nothing happens."""
    end = DONE
    """What is written after the last event of a complete answer."""

    def __init__(self, request: web.Request, *, ping_s: float) -> None:
        self._request = request
        self._ping_s = ping_s
        self._last_write = 0.0
        self._pinger: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_pings()

    async def send(self, value: object) -> None:
        """Write one event; raises ConnectionError when the client is gone."""
        self._last_write = asyncio.get_running_loop().time()
        await self.response.write(self.encode(value))

    def encode(self, value: Any) -> bytes:
        """Return one event as it goes over the wire."""
        return encode_event(value)

    async def done(self) -> None:
        """Write the end mark of a complete answer and end the response."""
        self._stop_pings()
        await self.response.write(self.end)
        await self.response.write_eof()

    async def fail(self, error: object) -> None:
        """Write an error in place of the rest; no end mark, and the connection closes."""
        self._stop_pings()
        await self.send(error)
        self.response.force_close()
        await self.response.write_eof()

    def _stop_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = loop.time() - self._last_write
            if idle_s >= self._ping_s:
                self._last_write, idle_s = loop.time(), 0.0
                try:
                    await self.response.write(self.ping)
                except ConnectionError:
                    return  # the handler itself learns of it, from aiohttp or at its next write
            await asyncio.sleep(self._ping_s - idle_s)
