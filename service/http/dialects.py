"""Which API's words a prompt is in, for the routes that are sent the bodies of either.

Knows a body's fields and its headers; nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from radixkv.service.http.anthropic_schema import AnthropicChat
from radixkv.service.http.body import Model, read_object, validate
from radixkv.service.http.fields import OriginFields

Theirs = TypeVar("Theirs", bound="AnthropicPrompt")

HEADER = "anthropic-version"
"""Anthropic's clients send it with all that they send."""
_BLOCKS = ("tool_use", "tool_result")


class AnthropicPrompt(AnthropicChat, OriginFields):
    """A prompt as `POST /v1/messages` has it; the fields of its answer are not looked at. Taken for
    one by the header `anthropic-version`, or by what OpenAI's chats do not have: `system`, tools
    with an `input_schema`, and blocks `tool_use` or `tool_result`."""

    model: str | None = None


async def read_either(
    request: web.Request, ours: type[Model], theirs: type[Theirs]
) -> Model | Theirs:
    """Read the body of ``request`` as ``theirs`` if it is in Anthropic's words, else as ``ours``.

    Raises InvalidRequest as ``read_body`` does.
    """
    named = HEADER in request.headers

    def make(body: dict[str, Any]) -> Model | Theirs:
        if body.get("messages") is not None and (named or in_anthropics_words(body)):
            return validate(body, theirs)
        return validate(body, ours)

    return await read_object(request, make)


def in_anthropics_words(body: Mapping[str, Any]) -> bool:
    """Tell whether a body says anything that OpenAI's chats say otherwise."""
    return (
        body.get("system") is not None
        or any("input_schema" in tool for tool in _objects(body.get("tools")))
        or any(
            block.get("type") in _BLOCKS
            for message in _objects(body.get("messages"))
            for block in _objects(message.get("content"))
        )
    )


def _objects(value: object) -> Iterable[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
