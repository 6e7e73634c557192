"""The bodies of requests, and what of the engine's terms each means."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import MAX_LOGPROBS, SamplingParams
from radixkv.service.http.fields import GenerationFields, Strict, need_one_of
from radixkv.service.http.marks import CacheFields, Mark, marks_of
from radixkv.service.http.messages import ChatFields, Messages
from radixkv.service.http.structured import StructuredFields
from radixkv.service.http.tools_schema import Calling, ToolChoice, calling_of
from radixkv.service.http.unsupported import CHAT, COMPLETION, refuse_unsupported

MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 1024
DEFAULT_COMPLETION_TOKENS = 16


class ChatRequest(GenerationFields, ChatFields, StructuredFields, CacheFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of `max_tokens`; wins if both are given."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Needs `logprobs: true`."
    )

    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto` (default) lets the model choose, `none` takes all for text, `required` "
        "forces a call, and so does a function's name: by a grammar.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call an answer. Default true."
    )

    def calling(self) -> Calling:
        """Return what is wanted of calls; raises InvalidRequest."""
        return calling_of(self.shown_tools, self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> SamplingParams:
        """Check what concerns several fields, and return the engine's parameters."""
        refuse_unsupported(self.model_extra, CHAT)
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is only accepted with logprobs: true", param="top_logprobs"
            )
        given = self.common_sampling() | {"grammar": self.grammar_spec()}
        given["max_tokens"] = self.max_completion_tokens or self.max_tokens
        if given["max_tokens"] == 0:
            raise InvalidRequest("max_tokens is 0; wanted 1 or more", param="max_tokens")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**given)

    def marks(self) -> tuple[Mark, ...]:
        """Return where prefixes that are to stay resident end; raises InvalidRequest."""
        turns = [message.parts(f"messages[{i}]") for i, message in enumerate(self.messages)]
        return marks_of(turns, self)


Prompt = str | list[int]


def prompt_list(value: object) -> object:
    """Turn the four shapes of a prompt into a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "wanted a string, a list of strings, a list of token ids or a list of those"
        )
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are accepted")
    prompts: list[Prompt] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item and all(type(t) is int for t in item):
            prompts.append(_token_ids(item))
        else:
            raise ValueError(f"item {i} is neither a string nor a list of token ids")
    return prompts


def _token_ids(ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) >= 2**31:
        raise ValueError("token ids are whole numbers from 0 up to the vocabulary's size")
    return ids


class CompletionRequest(GenerationFields, StructuredFields):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(description="One prompt or up to 256; text or token ids."),
    ]
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(
        None, description="Default true: add the tokenizer's BOS to text prompts."
    )

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _as_list(cls, value: object, _handler: object) -> object:
        return prompt_list(value)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one a choice group."""
        return self.prompt  # type: ignore[return-value]  # the validator made it this list

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated: ``echo`` with ``max_tokens: 0``."""
        return self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        """Check what concerns several fields, and return the engine's parameters."""
        refuse_unsupported(self.model_extra, COMPLETION)
        self.check_stream()
        n = self.n or 1
        if self.scores_only and not self.echo:
            raise InvalidRequest(
                "max_tokens is 0, which is only accepted with echo: true", param="max_tokens"
            )
        if n * len(self.prompts) > MAX_TOTAL_CHOICES:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts with n={n} make {n * len(self.prompts)} choices; at "
                f"most {MAX_TOTAL_CHOICES} are accepted in one request",
                param="n",
            )
        given = self.common_sampling() | {"grammar": self.grammar_spec()}
        given["max_tokens"] = (
            DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)
        )
        given["logprobs"] = self.logprobs
        if self.echo and self.logprobs is not None:
            given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return SamplingParams(**given)


class TokenizeRequest(ChatFields):
    """The body of `POST /tokenize`: one of `prompt`, `messages` or llama.cpp's `content`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    content: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for `prompt`, false for `content`."
    )
    add_special: bool | None = Field(None, description="llama.cpp's name of the same.")
    return_token_strs: bool | None = Field(None, description="Also answer each token's text.")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        need_one_of(self, "prompt", "messages", "content")
        return self


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
