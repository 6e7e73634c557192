"""Errors as Anthropic's clients read them, on the routes that they call.

{"type": "error", "error": {"type": str, "message": str}, "request_id": str}

Knows paths and shapes; what went wrong, and with which status, was decided before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import TypedDict

if TYPE_CHECKING:
    from radixkv.service.http.errors import ErrorReply

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """The body of every answer that is not a success, and the `error` event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def speaks_anthropic(path: str) -> bool:
    """Whether the clients of ``path`` are Anthropic's, whether or not there is such a route."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def anthropic_error(status: int, body: ErrorReply, request_id: str) -> AnthropicError:
    """Say in this shape what ``body`` says in OpenAI's."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": body["error"]["message"]},
        "request_id": request_id,
    }
