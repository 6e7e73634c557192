"""The shapes of what Anthropic's clients are answered, whole and as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from radixkv.service.engine.keep import Kept
from radixkv.service.engine.params import Usage
from radixkv.service.http.diagnostics import AnthropicDiagnostics
from radixkv.service.http.replies import RadixKV

StopWord = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_LONG_S = 300.0
"""A breakpoint that lives longer is reported with those of an hour."""


class CacheCreation(TypedDict):
    """Tokens that this request computed and that stay resident, by how long they do."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    """Tokens of a request: input + cache read + cache creation are the whole prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation


class TextBlockReply(TypedDict):
    """What the model said."""

    type: Literal["text"]
    text: str


class ToolUseReply(TypedDict):
    """A call; in `content_block_start` still without input."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockReply = TextBlockReply | ToolUseReply


class MessageReply(TypedDict):
    """The answer to `POST /v1/messages`; in `message_start` still without content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockReply]
    stop_reason: StopWord | None
    stop_sequence: str | None
    usage: MessageUsage
    radixkv: NotRequired[RadixKV]
    diagnostics: NotRequired[AnthropicDiagnostics]


class TokenCount(TypedDict):
    """The answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(TypedDict):
    """The first event; its usage is complete but for the output."""

    type: Literal["message_start"]
    message: MessageReply


class BlockStart(TypedDict):
    """A content block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: BlockReply


class Ping(TypedDict):
    """Nothing; keeps the connection."""

    type: Literal["ping"]


class TextDelta(TypedDict):
    """What an event adds to a block of text."""

    type: Literal["text_delta"]
    text: str


class InputDelta(TypedDict):
    """What an event adds to the JSON text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    """A content block goes on."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta


class BlockStop(TypedDict):
    """A content block ends."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(TypedDict):
    """Why the answer ended."""

    stop_reason: StopWord
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The answer ends; usage counts everything."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent = (
    MessageStart | BlockStart | Ping | BlockDelta | BlockStop | MessageDelta | MessageStop
)


def message_usage(usage: Usage, kept: Sequence[Kept]) -> MessageUsage:
    """Divide a prompt into what was found, what was computed to stay, and the rest.

        0 ........ cached ........ granted ........ prompt
        |   read     |   creation    |    input      |

    Each part of the creation goes to the breakpoint that ends it.
    """
    made: CacheCreation = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    at = usage.cached_tokens
    for one in sorted(kept, key=lambda one: one.granted_tokens):
        new = max(0, one.granted_tokens - at)
        if one.keep.ttl_s is None or one.keep.ttl_s > _LONG_S:
            made["ephemeral_1h_input_tokens"] += new
        else:
            made["ephemeral_5m_input_tokens"] += new
        at += new
    return {
        "input_tokens": usage.prompt_tokens - at,
        "cache_creation_input_tokens": at - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation": made,
    }
