"""Content blocks as Anthropic's clients send them, and the turns of a chat that they make.

Text of one role that follows itself is one turn; each result of a call is a turn of its own, as
OpenAI's clients have it, so that the same chat is the same prompt by either way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.service.http.fields import Strict
from radixkv.service.http.marks import CacheControl, Part
from radixkv.service.http.tools_schema import FunctionName


class TextBlock(Strict):
    """Some text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(Strict):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Strict):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


@dataclass(slots=True)
class Turn:
    """A message that the template is shown."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: list[Part]
    calls: list[ToolUseBlock] = field(default_factory=list)
    result_of: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return it as OpenAI's clients would send it."""
        texts = [part.text for part in self.parts if not part.is_call]
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.input, ensure_ascii=False),
                    },
                }
                for call in self.calls
            ]
        if self.result_of is not None:
            message["tool_call_id"] = self.result_of
        return message


def turns_of(
    system: str | list[TextBlock] | None,
    messages: Sequence[tuple[Literal["user", "assistant"], str | list[Block]]],
) -> list[Turn]:
    """Return the turns of a chat. A system prompt without text is none."""
    turns: list[Turn] = []
    if system and any(part.text for part in _texts(system, "system")):
        turns.append(Turn("system", _texts(system, "system")))
    for i, (role, content) in enumerate(messages):
        at = f"messages[{i}].content"
        if isinstance(content, str):
            _turn(turns, role).parts.append(Part(content, at=at))
            continue
        for j, block in enumerate(content):
            _add(turns, role, block, f"{at}[{j}]")
    return turns


def _add(turns: list[Turn], role: Literal["user", "assistant"], block: Block, at: str) -> None:
    match block:
        case TextBlock():
            _turn(turns, role).parts.append(Part(block.text, block.cache_control, at=at))
        case ToolUseBlock():
            turn = _turn(turns, role)
            turn.calls.append(block)
            turn.parts.append(Part("", block.cache_control, at=at, is_call=True))
        case ToolResultBlock():
            parts = _texts(block.content or "", f"{at}.content")
            if block.cache_control is not None:
                # Also where the result is empty: the turn ends there, and is never empty itself.
                parts.append(Part("", block.cache_control, at=at, is_call=True))
            turns.append(Turn("tool", parts, result_of=block.tool_use_id))


def _turn(turns: list[Turn], role: Literal["user", "assistant"]) -> Turn:
    if not turns or turns[-1].role != role:
        turns.append(Turn(role, []))
    return turns[-1]


def _texts(content: str | list[TextBlock], at: str) -> list[Part]:
    if isinstance(content, str):
        return [Part(content, at=at)]
    return [
        Part(block.text, block.cache_control, at=f"{at}[{j}]") for j, block in enumerate(content)
    ]
