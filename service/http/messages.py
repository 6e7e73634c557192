"""The chat part of a request: turns of text, and how the template is to write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
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
from radixkv.service.http.unsupported import MESSAGE, Unsupported, refuse_unsupported

# These reach the template's renderer as arguments of its own; a caller who sets them would swap the
# template, or what it returns, for everyone's server time.
_RESERVED_KWARGS = frozenset(
    {
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


class Message(Strict):
    """One turn of a chat. The role ``developer`` means ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = Field(None, max_length=256)
    cache_control: CacheControl | None = Field(
        None, description="The same as on the last part of the content."
    )
    _parts: list[dict[str, Any]] = PrivateAttr(default_factory=list)

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

    def for_template(self) -> dict[str, str]:
        """Return what the chat template sees."""
        role = "system" if self.role == "developer" else self.role
        shown = {"role": role, "content": str(self.content)}
        return shown | ({"name": self.name} if self.name else {})


def _check_messages(value: object) -> object:
    """Name foreign parts and fields by their place, which a nested validator cannot know."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("is empty; wanted at least one message")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            continue
        if message.get("role") in ("tool", "function"):
            raise Unsupported(
                f"messages[{i}].role",
                f"messages[{i}] has the role {message['role']!r}; this server does no tool calls",
            )
        refuse_unsupported(message, MESSAGE, at=f"messages[{i}].")
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                path = f"messages[{i}].content[{j}]"
                raise Unsupported(
                    f"{path}.type",
                    f"{path} is of type {kind[:40]!r}; this server's model reads text parts only",
                )
    return value


Messages = Annotated[list[Message], BeforeValidator(_check_messages)]


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
        }
