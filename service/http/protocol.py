"""What happens on a connection outside of any route: bytes that are no HTTP, clients that hang up.

aiohttp answers the first in plain text and logs both with a traceback that quotes what was sent. We
answer in JSON like everywhere, and at the level that people run at log only what is our fault.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from radixkv.service.http.errors import error_reply

LOG = logging.getLogger("radixkv.http")


class Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what came to no handler, or out of none, and close the connection."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone: aiohttp ends the connection and says nothing
        if status < 500:
            body = error_reply(
                status, "The request is no HTTP that this server accepts.", code="bad_request"
            )
        else:
            LOG.error("request failed on a bug", exc_info=exc)
            body = error_reply(status, "The server had an error.", code="internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        response = web.json_response(body, status=status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what is left: a body that broke off or did not decode while nobody read it."""
        LOG.debug(*args, **kwargs)
