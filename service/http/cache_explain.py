"""POST /v1/cache/explain: what a request with this body would find in the cache, and why not more.

Nothing is run, held, touched or counted. The body is that of a chat, in OpenAI's words or in
Anthropic's, that of a completion, or token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from aiohttp import web
from pydantic import Field, field_validator, model_validator

from radixkv.errors import InvalidRequest
from radixkv.service.http.anthropic_schema import chat_of
from radixkv.service.http.auth import caller_of
from radixkv.service.http.dialects import AnthropicPrompt, read_either
from radixkv.service.http.explain_shapes import ExplainReply
from radixkv.service.http.explaining import AskedChat, record_of
from radixkv.service.http.extras import PROMPTS, chat_sections
from radixkv.service.http.fields import GenerationFields, need_one_of, one_of
from radixkv.service.http.marks import CacheFields
from radixkv.service.http.messages import ChatFields, Message, Messages
from radixkv.service.http.schema import Prompt, prompt_list
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import json_reply


class ExplainRequest(GenerationFields, ChatFields, CacheFields):
    """The body of `POST /v1/cache/explain`: one of `messages`, `prompt` and `tokens`, and whatever
    the request to be explained has beside them."""

    messages: Messages | None = Field(None, min_length=1)
    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]] | None,
        Field(description="One prompt, as text or as token ids."),
    ] = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, min_length=1)
    echo: bool | None = None
    logprobs: int | bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _as_list(cls, value: object, _handler: object) -> object:
        return None if value is None else prompt_list(value)

    @model_validator(mode="after")
    def _one_source(self) -> ExplainRequest:
        need_one_of(self, "messages", "prompt", "tokens")
        return self

    @property
    def param(self) -> str:
        """The name of the field that holds the prompt."""
        return one_of(self, "messages", "prompt", "tokens")

    @property
    def reads_cache(self) -> bool:
        """Whether such a request may start from cached tokens."""
        scores = self.echo and self.logprobs is not None and self.logprobs is not False
        return self.prompt_logprobs is None and not (self.messages is None and scores)


class ExplainMessageRequest(AnthropicPrompt):
    """The body of `POST /v1/cache/explain` in Anthropic's words: that of `POST /v1/messages`."""


async def cache_explain(request: web.Request) -> web.Response:
    """Explain a prompt."""
    serving, memory = request.app[SERVING], request.app[PROMPTS]
    engine = serving.engine
    body = await read_either(request, ExplainRequest, ExplainMessageRequest)
    serving.check_model(body.model)
    origin = body.origin(request)
    chat, nearest = None, None
    asked: Sequence[Message] | None
    if isinstance(body, ExplainRequest):
        asked, param, reads_cache = body.messages, body.param, body.reads_cache
    else:
        (asked, _), param, reads_cache = chat_of(body), "messages", True
    if asked is not None:
        chat = AskedChat([message.for_template() for message in asked], body.rendering())
        serving.check_length("".join(str(message.content) for message in asked), "messages")
        ids = await serving.render(asked, dict(chat.rendering))
        sections = chat_sections(engine, chat, origin)
        nearest = memory.nearest(caller_of(request).tenant, sections)
    else:
        assert isinstance(body, ExplainRequest), "a chat without messages"
        ids = await _prompt_ids(serving, body)
    serving.check_length(ids, param)
    engine.prompting.check_ids(ids, param)

    def look() -> ExplainReply:
        explained = engine.cache.explain(
            ids,
            origin=origin,
            may_read=reads_cache,
            every_salt=caller_of(request).is_admin,
        )
        record = record_of(engine, explained, ids, chat, nearest)
        return {
            **record,
            "object": "cache.explanation",
            "model": engine.model_name,
            "deterministic": engine.config.deterministic,
        }

    return json_reply(await asyncio.to_thread(look))


async def _prompt_ids(serving: Serving, body: ExplainRequest) -> list[int]:
    if body.tokens is not None:
        return body.tokens
    prompts: list[Prompt] = body.prompt  # type: ignore[assignment]  # the validator made it this list
    if len(prompts) != 1:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts; one is explained at a time", param="prompt"
        )
    serving.check_length(prompts[0], "prompt")
    (ids,) = await serving.tokenize(
        prompts, add_special_tokens=body.add_special_tokens is not False
    )
    return ids
