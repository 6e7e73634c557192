"""The one place where errors become HTTP: always JSON, in OpenAI's shape unless said otherwise.

{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}
"""

from __future__ import annotations

import logging
from typing import NotRequired

from aiohttp import web
from aiohttp.typedefs import Handler
from typing_extensions import TypedDict

from radixkv.errors import Overloaded, RadixKVError
from radixkv.service.http.anthropic_errors import (
    AnthropicError,
    anthropic_error,
    speaks_anthropic,
)
from radixkv.service.http.limits import LimitDetail, LimitReached
from radixkv.service.http.observe import line_of

LOG = logging.getLogger("radixkv.http")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}

_SHOWN_PATH = 200


class HttpError(RadixKVError):
    """An answer that only the HTTP service gives, such as a 415."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code if code is not None else _CODES.get(status)
        self.headers: dict[str, str] = {}


class ModelNotFound(RadixKVError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"The model {name[:200]!r} does not exist; this server serves {served!r}.",
            param="model",
        )


class Loading(RadixKVError):
    """The model is still being loaded."""

    status = 503
    code = "loading"

    def __init__(self) -> None:
        super().__init__("Loading model")


class ShuttingDown(RadixKVError):
    """The server is stopping and takes no more work."""

    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class ErrorDetail(TypedDict):
    """What went wrong, in words and in names that programs can test for."""

    message: str
    type: str
    param: str | None
    code: str | None
    limit: NotRequired[LimitDetail]


class ErrorReply(TypedDict):
    """The body of every answer that is not a success, and of an error inside a stream."""

    error: ErrorDetail


def error_reply(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> ErrorReply:
    """Build the body for ``status``; the type follows from it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException, request_id: str) -> tuple[int, ErrorReply, dict[str, str]]:
    """Turn any error into a status, a body and headers; what we did not foresee shows no detail."""
    if isinstance(error, RadixKVError):
        headers = dict(error.headers) if isinstance(error, HttpError) else {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(max(1, error.retry_after_s))
        elif isinstance(error, Loading):
            headers["Retry-After"] = "2"
        body = error_reply(error.status, str(error), code=error.code, param=error.param)
        if isinstance(error, LimitReached):
            body["error"]["limit"] = error.limit
        return error.status, body, headers
    if isinstance(error, web.HTTPException):
        return (
            error.status,
            _from_aiohttp(error),
            {k: v for k, v in error.headers.items() if k in ("Allow", "Location")},
        )
    message = f"The server had an error; its log has the details under {request_id}."
    return 500, error_reply(500, message, code="internal_error"), {}


def error_code(error: BaseException) -> str:
    """Name an error for the log and the metrics."""
    return str(getattr(error, "code", None) or type(error).__name__)


def _from_aiohttp(error: web.HTTPException) -> ErrorReply:
    code = _CODES.get(error.status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"The method {error.method} is not allowed here; allowed: {allowed}."
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "The request body is larger than this server accepts (max_body)."
    else:
        message = error.reason or f"HTTP {error.status}"
    return error_reply(error.status, message, code=code)


def log_bug(request_id: str) -> None:
    """Log the exception being handled: one that nobody foresaw."""
    LOG.exception("request failed on a bug", extra={"fields": {"id": request_id}})


@web.middleware
async def errors_to_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in JSON; a client that is gone gets none."""
    line = line_of(request)
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as e:
        status, body, headers = describe(e, line.id)
        if isinstance(e, web.HTTPNotFound):
            body["error"]["message"] = await _no_route(request)
        line.error = error_code(e)
        if status == 500:
            log_bug(line.id)
        shown = shaped(request, status, body)
        return web.json_response(shown, status=status, headers=headers)


async def _no_route(request: web.Request) -> str:
    """Name the route that is missing, and the one that was meant if only /v1 was forgotten."""
    path = request.rel_url.raw_path
    missing = f"There is no route {request.method} {path[:_SHOWN_PATH]}"
    if len(path) <= _SHOWN_PATH:
        meant = request.clone(rel_url=request.rel_url.with_path(f"/v1{path}", encoded=True))
        if (await request.app.router.resolve(meant)).http_exception is None:
            return f"{missing}; did you mean /v1{path} (base_url ends in /v1)?"
    return f"{missing}; GET /openapi.json lists them all."


def shaped(request: web.Request, status: int, body: ErrorReply) -> ErrorReply | AnthropicError:
    """Return ``body`` in the shape that the clients of this route read."""
    if speaks_anthropic(request.path):
        return anthropic_error(status, body, line_of(request).id)
    return body
