"""The chat part of a request: turns of text and calls, and how the template is to write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from radixkv.errors import InvalidRequest
from radixkv.service.http.fields import Strict
from radixkv.service.http.marks import CacheBreakpoint, CacheControl, Part, read_part
from radixkv.service.http.tools_schema import FunctionName, Tools
from radixkv.service.http.unsupported import (
    MESSAGE,
    Unsupported,
    refuse_kind,
    refuse_unsupported,
)
from radixkv.service.tools_history import shown_call

# These reach the template's renderer as arguments of its own; a caller who sets them would swap the
# template, or what it returns, for everyone's server time.
_RESERVED_KWARGS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "chat_template",
        "tokenize",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
        "load_audio_from_video",
    }
)


class TextPart(Strict):
    """A content part; several are joined by line ends. Parts of other types are refused."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


def _content_text(value: object) -> object:
    """Join text parts by line ends, as vLLM and llama.cpp do."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("wanted a string or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"part {i} is no object of type 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {i} has no text")
        texts.append(part["text"])
    return "\n".join(texts)


Content = Annotated[str | list[TextPart], BeforeValidator(_content_text)]
"""Becomes a string."""


class CalledFunction(Strict):
    """What was called, with what."""

    name: FunctionName
    arguments: str = Field(description="The JSON of an object; what is none is shown as it is.")


class ToolCallShape(Strict):
    """A call that the assistant made."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One turn of a chat. The role ``developer`` means ``system``; ``tool`` answers a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field("", description="May be null where there are `tool_calls`.")
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCallShape] | None = Field(
        None, description="Of the assistant: the calls that it made."
    )
    tool_call_id: str | None = Field(
        None, max_length=256, description="Of the role `tool`: the call that this is the result of."
    )
    cache_control: CacheControl | None = Field(
        None, description="The same as on the last part of the content."
    )
    _parts: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _function: str | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_parts(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        message = handler(value)
        content = value.get("content") if isinstance(value, dict) else None
        if isinstance(content, list):
            message._parts = content
        return message

    def parts(self, at: str) -> list[Part]:
        """Return the content as it was sent; ``at`` is the message's place in the body.

        Raises InvalidRequest where a breakpoint is none.
        """
        if self._parts:
            parts = [read_part(p, f"{at}.content[{j}]") for j, p in enumerate(self._parts)]
        else:
            parts = [Part(str(self.content), at=f"{at}.content")]
        if self.cache_control is not None and parts[-1].control is None:
            parts[-1] = replace(parts[-1], control=self.cache_control)
        return parts

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template sees."""
        role = "system" if self.role == "developer" else self.role
        shown: dict[str, Any] = {"role": role, "content": str(self.content)}
        if name := self.name or self._function:
            shown["name"] = name
        if self.tool_calls:
            shown["tool_calls"] = [
                shown_call(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        return shown


def _check_messages(value: object) -> object:
    """Name foreign parts and fields by their place, which a nested validator cannot know."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("is empty; wanted at least one message")
    value = list(value)
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            continue
        if message.get("role") == "function":
            raise Unsupported(
                f"messages[{i}].role",
                f"messages[{i}] has the role 'function', of an older API; results of calls have "
                "the role 'tool' and a tool_call_id",
            )
        refuse_unsupported(message, MESSAGE, at=f"messages[{i}].")
        _check_calls(message, f"messages[{i}]")
        if message.get("tool_calls") and message.get("content") is None:
            value[i] = {**message, "content": ""}
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            place = f"messages[{i}].content[{j}]"
            refuse_kind(part, ("text",), place, "this server's model reads text parts only")
    return value


def _check_calls(message: dict[str, Any], at: str) -> None:
    """Refuse parts of calls in the wrong turns, and turns that lack what theirs must have."""
    role, calls = message.get("role"), message.get("tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(
            f"{at} has tool_calls and the role {str(role)[:40]!r}; only the assistant calls",
            param=f"{at}.tool_calls",
        )
    if (message.get("tool_call_id") is not None) != (role == "tool"):
        if role == "tool":
            raise _missing(f"{at}.tool_call_id")
        raise InvalidRequest(
            f"{at} has a tool_call_id and not the role 'tool'", param=f"{at}.tool_call_id"
        )
    if "content" not in message and not calls:
        raise _missing(f"{at}.content")


def _missing(path: str) -> InvalidRequest:
    problem = InvalidRequest(f"missing required parameter: '{path}'", param=path)
    problem.code = "missing_required_parameter"
    return problem


def name_results(messages: list[Message]) -> list[Message]:
    """Tell each result of a call its function, which some templates want to name."""
    called: dict[str, str] = {}
    for message in messages:
        for call in message.tool_calls or ():
            called[call.id] = call.function.name
        if message.role == "tool":
            message._function = called.get(message.tool_call_id or "")
    return messages


Messages = Annotated[list[Message], BeforeValidator(_check_messages), AfterValidator(name_results)]


class ChatFields(Strict):
    """What is needed to render a chat into tokens."""

    add_generation_prompt: bool | None = Field(
        None, description="Default true: end the prompt where the assistant's turn begins."
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open, so that the answer continues it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as `enable_thinking`."
    )
    tools: Tools | None = Field(
        None, description="Functions that the model may call, shown to it just as they are here."
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in _RESERVED_KWARGS or name.startswith("_"):
                raise ValueError(f"{name[:40]!r} cannot be set here")
        return value

    def rendering(self) -> dict[str, Any]:
        """Return the arguments of ``Engine.render`` beside the messages."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "template_kwargs": self.chat_template_kwargs,
            "tools": self.shown_tools,
        }

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools as they were sent; None if there are none."""
        return self.tools or None  # type: ignore[return-value]  # the validator kept what was sent
