"""The bodies of Anthropic's routes, and the chat that each of them means."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import SamplingParams
from radixkv.service.http.anthropic_blocks import Block, TextBlock, Turn, turns_of
from radixkv.service.http.anthropic_tools import (
    AnthropicToolChoice,
    AnthropicTools,
    calling_of,
    shown_tools,
)
from radixkv.service.http.fields import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    TIERS,
    AnthropicTier,
    OriginFields,
    RadixKVOptions,
    Strict,
)
from radixkv.service.http.marks import AutomaticFields, Mark, marks_of
from radixkv.service.http.messages import Message, name_results
from radixkv.service.http.tools_schema import Calling
from radixkv.service.http.unsupported import ANTHROPIC, refuse_kind, refuse_unsupported

_NEUTRAL_KINDS: Mapping[str, frozenset[str]] = {
    # Objects whose `type` says that nothing is asked; other values change the answer.
    "thinking": frozenset({"disabled"}),
}
_BLOCKS_OF: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "tool_use"}),
}


def _check_blocks(content: object, at: str, known: Collection[str] = ("text",)) -> None:
    """Name foreign blocks by their place, which a nested validator cannot know."""
    why = f"this server's model reads {' and '.join(sorted(known))} blocks here only"
    for j, block in enumerate(content if isinstance(content, list) else ()):
        refuse_kind(block, known, f"{at}[{j}]", why)
        if isinstance(block, dict) and block.get("type") == "tool_result":
            _check_blocks(block.get("content"), f"{at}[{j}].content")


def _check_system(value: object) -> object:
    _check_blocks(value, "system")
    return value


def _check_messages(value: object) -> object:
    for i, message in enumerate(value if isinstance(value, list) else ()):
        if isinstance(message, dict):
            known = _BLOCKS_OF.get(str(message.get("role")), ("text",))
            _check_blocks(message.get("content"), f"messages[{i}].content", known)
    return value


class AnthropicMessage(Strict):
    """One turn, or a part of one: turns of one role that follow each other are one."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1)]


class AnthropicChat(AutomaticFields):
    """What makes the prompt in a body of Anthropic's."""

    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1), BeforeValidator(_check_messages)
    ]
    system: Annotated[str | list[TextBlock] | None, BeforeValidator(_check_system)] = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None

    def check_supported(self) -> None:
        """Refuse what would change the answer if it were ignored."""
        asked = dict(self.model_extra or {})
        for name, neutral in _NEUTRAL_KINDS.items():
            value = asked.get(name)
            if isinstance(value, dict) and value.get("type") in neutral:
                del asked[name]
        refuse_unsupported(asked, ANTHROPIC)
        self.calling()

    def calling(self) -> Calling:
        """Return what is wanted of calls; raises InvalidRequest."""
        return calling_of(self.tools, self.tool_choice)

    def check_end(self, turns: Sequence[Turn]) -> None:
        """Refuse a beginning of the answer after which no model goes on as it speaks."""
        last = turns[-1]
        if last.calls:
            raise InvalidRequest(
                "the last message has a tool_use block; what comes next is its tool_result",
                param="messages",
            )
        if self.continues and (part := last.parts[-1]).text != part.text.rstrip():
            raise InvalidRequest(
                f"{part.at} is the beginning of the answer and ends in white space, after which "
                "the model would not go on as it speaks; leave that out",
                param=part.at,
            )

    @property
    def continues(self) -> bool:
        """Whether the last turn is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    def rendering(self) -> dict[str, Any]:
        """Return the arguments of ``Engine.render`` beside the messages."""
        return {
            "add_generation_prompt": not self.continues,
            "continue_final_message": self.continues,
            "tools": shown_tools(self.tools),
        }


class CountTokensRequest(AnthropicChat):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str


class DiagnosticsOptions(Strict):
    """Asks why the prompt did not go on from an earlier one."""

    previous_message_id: str | None = Field(
        None, max_length=128, description="The id of the answer to it; null in a first turn."
    )


class MessagesRequest(CountTokensRequest, OriginFields):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="Tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=1, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0 keeps every token.")
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] | None = (
        Field(None, max_length=MAX_STOPS, description="Strings that end the answer, never shown.")
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    service_tier: AnthropicTier | None = Field(None, description=TIERS)
    metadata: dict[str, Any] | None = Field(
        None, description="Accepted and not looked at: who asks is known by the key alone."
    )
    diagnostics: DiagnosticsOptions | None = None
    radixkv: RadixKVOptions | None = None
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**64, description="radixkv's own: draw the same answer again."
    )

    def sampling(self) -> SamplingParams:
        """Return the engine's parameters."""
        given: dict[str, Any] = {
            name: value
            for name in ("max_tokens", "temperature", "top_k", "seed")
            if (value := getattr(self, name)) is not None
        }
        if self.top_p is not None:
            given["top_p"] = self.top_p or 1e-9  # the likeliest token alone, as 0 means elsewhere
        return SamplingParams(**given, stop=tuple(self.stop_sequences or ()))


def chat_of(body: AnthropicChat) -> tuple[list[Message], tuple[Mark, ...]]:
    """Return the chat that ``body`` means and its breakpoints; raises InvalidRequest."""
    body.check_supported()
    turns = turns_of(body.system, [(m.role, m.content) for m in body.messages])
    body.check_end(turns)
    messages = [Message.model_validate(turn.as_message()) for turn in turns]
    controls = [tool.cache_control for tool in body.tools or ()]
    return name_results(messages), marks_of([turn.parts for turn in turns], body, controls)
