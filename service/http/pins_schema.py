"""The bodies of the routes that pin prompts and warm them, and the shapes of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from radixkv.service.http.anthropic_schema import chat_of
from radixkv.service.http.dialects import AnthropicPrompt
from radixkv.service.http.fields import OriginFields, Strict, need_one_of, one_of
from radixkv.service.http.marks import CacheFields, Mark, Ttl, marks_of
from radixkv.service.http.messages import ChatFields, Message, Messages
from radixkv.service.http.replies import RadixKV


class PromptRequest(ChatFields, OriginFields):
    """A prompt in one of three forms; the fields of a chat mean what they mean there."""

    model: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    prompt: str | None = Field(None, min_length=1)
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Default true: add the tokenizer's BOS to a `prompt`."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt where the assistant's turn begins. Default: if the last "
        "message is to be answered, a user's or a tool's; after a system prompt any may follow.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> PromptRequest:
        need_one_of(self, "messages", "prompt", "tokens")
        if (self.model_extra or {}).get("system") is not None:
            raise ValueError("system is not read here; let messages begin with one of that role")
        return self

    @property
    def param(self) -> str:
        """The name of the field that holds the prompt."""
        return one_of(self, "messages", "prompt", "tokens")

    def chat(self) -> tuple[list[Message], tuple[Mark, ...]] | None:
        """Return the messages, and where prefixes that are to stay resident end."""
        return None if self.messages is None else (self.messages, ())

    def rendering(self) -> dict[str, Any]:
        """Return the arguments of ``Engine.render`` beside the messages."""
        # Behind the beginning of an answer that nobody asks for, no chat would go on as this does:
        # to none of them a pin would be of use.
        answered = self.messages is not None and self.messages[-1].role in ("user", "tool")
        return super().rendering() | {
            "add_generation_prompt": answered
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        }


class PinFields(Strict):
    """What is said of a pin beside its prompt."""

    ttl: Ttl | None = Field(
        None,
        description="Let it go when it was not used for so long, such as 5m, 1h or 7d; default: "
        "never, until it is unpinned or the server ends.",
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Your own name for it. A pin that had this name before is let go.",
    )


class PinRequest(PromptRequest, PinFields):
    """The body of `POST /v1/cache/pin`."""


class PinMessageRequest(AnthropicPrompt, PinFields):
    """The same in Anthropic's words."""

    def chat(self) -> tuple[list[Message], tuple[Mark, ...]]:
        """Return the messages; breakpoints do not count, for all is pinned."""
        return chat_of(self)[0], ()


class PrewarmRequest(PromptRequest, CacheFields):
    """The body of `POST /v1/cache/prewarm`; breakpoints count as in a chat."""

    def chat(self) -> tuple[list[Message], tuple[Mark, ...]] | None:
        """Return the messages, and where prefixes that are to stay resident end."""
        if self.messages is None:
            return None
        turns = [message.parts(f"messages[{i}]") for i, message in enumerate(self.messages)]
        return self.messages, marks_of(turns, self)


class PrewarmMessageRequest(AnthropicPrompt):
    """The same in Anthropic's words; breakpoints count as there."""

    def chat(self) -> tuple[list[Message], tuple[Mark, ...]]:
        """Return the messages, and where prefixes that are to stay resident end."""
        return chat_of(self)


class UnpinRequest(Strict):
    """The body of `POST /v1/cache/unpin`: one of `id` and `name`."""

    id: str | None = Field(None, min_length=1, max_length=128)
    name: str | None = Field(None, min_length=1, max_length=128)

    @model_validator(mode="after")
    def _one_way(self) -> UnpinRequest:
        if (self.id is None) == (self.name is None):
            raise ValueError("wanted exactly one of id and name")
        return self


class PinBudgetReply(TypedDict):
    """What the caller's tenant may pin and has pinned; a block under two pins counts once."""

    blocks: int
    used_blocks: int


class PinReply(TypedDict):
    """A pin: the first `pinned_tokens` of the `wanted_tokens` stay resident."""

    object: Literal["cache.pin"]
    id: str
    name: str | None
    pinned_tokens: int
    wanted_tokens: int
    cached_tokens: int
    ttl_s: float | None
    expires_at: int | None
    budget: PinBudgetReply


class UnpinReply(TypedDict):
    """What was let go: it stays cached for as long as nothing else needs the room."""

    object: Literal["cache.unpin"]
    ids: list[str]


class PrewarmReply(TypedDict):
    """A prompt is resident; the same one, sent now, would find `resident_tokens`."""

    object: Literal["cache.prewarm"]
    prompt_tokens: int
    cached_tokens: int
    resident_tokens: int
    radixkv: RadixKV


class PinListed(TypedDict):
    """A pin, without what it holds; times are Unix times. An admin sees the tenant too."""

    object: Literal["cache.pin"]
    id: str
    name: str | None
    pinned_tokens: int
    blocks: int
    ttl_s: float | None
    created_at: int
    expires_at: int | None
    tenant: NotRequired[str]


class PinList(TypedDict):
    """The pins of the caller's tenant; an admin sees everybody's, but no names of others."""

    object: Literal["list"]
    data: list[PinListed]
    budget: PinBudgetReply
