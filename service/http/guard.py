"""What is turned away by its headers alone: foreign names, web pages and expectations."""

from __future__ import annotations

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from yarl import URL

from radixkv.service.config import is_loopback
from radixkv.service.http.errors import HttpError, error_reply


@web.middleware
async def only_loopback_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a Host that is no loopback name: a web page may have made its own name point here.

    Its requests come from a browser on this machine (DNS rebinding), so binding to loopback alone
    does not keep it out, and for the browser they are of one origin.
    """
    host = request.headers.get("Host")
    if host is not None and not is_loopback(_name(host)):
        raise HttpError(
            403,
            f"this server answers to localhost and 127.0.0.1 only, not to {host[:100]!r}; a proxy "
            "in front must send such a Host, or the server be started with --insecure-remote",
        )
    return await handler(request)


def refuse_web_pages(request: web.Request) -> None:
    """Refuse a call of a web page: a browser may send it without asking, but names the page."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise HttpError(403, f"requests from web pages of {origin[:100]!r} are not accepted here")


async def answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Tell a client that waits for it to go on; answer any other expectation with a 417."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        body = error_reply(
            417, "The only Expect header accepted is 100-continue.", code="expectation_failed"
        )
        return web.json_response(body, status=417)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer itself has not begun
    return None


def _name(host: str) -> str:
    """Return a Host header without its port."""
    try:
        return URL(f"//{host}").host or ""
    except ValueError:
        return ""
