"""Gives every request an id and one log line: what was asked, how it ended, how long it took.

Never logs what was said: no prompts, no answers, no query strings.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from radixkv.service.http.anthropic_errors import speaks_anthropic

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream

LOG = logging.getLogger("radixkv.http")
CLIENT_GONE = 499
"""nginx's status for a client that hung up; only ever logged."""
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_QUIET = frozenset({"/health", "/v1/health", "/ping", "/metrics"})
"""Asked every few seconds by machines: logged at debug level while nothing is wrong."""


@dataclass(slots=True)
class RequestLine:
    """What the log will say of one request."""

    id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int = 500
    error: str | None = None
    tenant: str | None = None
    """Who called, if callers have keys here."""
    streams: list[Stream] = field(default_factory=list)
    paid: deque[int] = field(default_factory=deque)
    """Tokens of each prompt that its tenant was charged for and that is not submitted yet."""

    def fields(self) -> dict[str, object]:
        """Return the line's fields; those of tokens only if tokens were asked for."""
        found: dict[str, object] = {
            "id": self.id, "tenant": self.tenant, "status": self.status, "error": self.error
        }  # fmt: skip
        if self.streams:
            first = [s.first_token_s for s in self.streams if s.first_token_s is not None]
            found |= {
                "prompt_tokens": sum(s.usage.prompt_tokens for s in self.streams),
                "cached_tokens": sum(s.usage.cached_tokens for s in self.streams),
                "completion_tokens": sum(s.usage.completion_tokens for s in self.streams),
                "ttft_s": round(min(first) - self.started_s, 4) if first else None,
            }
        return found | {"duration_s": round(time.monotonic() - self.started_s, 4)}


LINE = web.RequestKey("LINE", RequestLine)


def line_of(request: web.Request) -> RequestLine:
    """Return the log line of a request that came through ``observe``."""
    return request[LINE]


def observing(count: Callable[[str, int], None]) -> Middleware:
    """Make the outermost middleware: it sees every request, and every way in which it can end.

    ``count`` is told each route's pattern and status.
    """

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        line = RequestLine(given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}")
        request[LINE] = line
        try:
            response = await handler(request)
            gone = request.transport is None or request.transport.is_closing()
            line.status = CLIENT_GONE if gone and line.error is None else response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            line.status = CLIENT_GONE
            raise
        finally:
            resource = request.match_info.route.resource
            count(resource.canonical if resource is not None else "none", line.status)
            _log(request, line)

    return observe


def _log(request: web.Request, line: RequestLine) -> None:
    quiet = request.path in _QUIET and (line.status == 200 or line.error == "loading")
    level = logging.DEBUG if quiet else logging.INFO
    if LOG.isEnabledFor(level):
        # The raw path, for a decoded one may hold line ends; never the query.
        what = {"method": request.method, "path": request.rel_url.raw_path[:200]}
        LOG.log(level, "request", extra={"fields": what | line.fields()})


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request in its answer, and do not tell which versions of what answered."""
    line = request.get(LINE)
    if line is not None:
        response.headers["X-Request-Id"] = line.id
        if speaks_anthropic(request.path):
            response.headers["request-id"] = line.id  # where their client looks for it
    response.headers["Server"] = "radixkv"
