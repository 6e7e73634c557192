"""What an answer carries beyond its API if the request asks: why tokens were missed, compared with
which earlier prompt. Also keeps the section digests that later requests are compared with.

Knows requests and answers; how an account or a comparison is made is said elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from radixkv.errors import InvalidRequest
from radixkv.service.http.auth import caller_of
from radixkv.service.http.diagnostics import OpenAIDiagnostics, openai_diagnostics
from radixkv.service.http.explain_shapes import LookupReply
from radixkv.service.http.explaining import AskedChat, record_of
from radixkv.service.http.past_prompts import PromptMemory, PromptSections, sections_of
from radixkv.service.http.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    RadixKV,
    radixkv_reply,
)
from radixkv.service.http.schema import ChatRequest, CompletionRequest
from radixkv.service.http.serving import SERVING

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.lookups import Lookup
    from radixkv.service.engine.origin import Origin
    from radixkv.service.engine.stream import Stream

PROMPTS = web.AppKey("PROMPTS", PromptMemory)


class ExtraParts(TypedDict):
    """Fields to be added to a whole answer, or to the first event of a stream."""

    radixkv: NotRequired[RadixKV]
    prompt_cache_diagnostics: NotRequired[OpenAIDiagnostics]


class Extras:
    """The extras of one answer."""

    def __init__(
        self,
        request: web.Request,
        answer_id: str,
        *,
        explain: bool,
        chat: AskedChat | None = None,
        sections: PromptSections | None = None,
        comparison_id: str | None = None,
    ) -> None:
        self.explain = explain
        """Whether the engine is to account for what it does not find."""
        self._engine = request.app[SERVING].engine
        self._memory = request.app[PROMPTS]
        self._tenant = caller_of(request).tenant
        self._id = answer_id
        self._chat = chat
        self._sections = sections
        self._comparison_id = comparison_id

    @classmethod
    def of_chat(cls, request: web.Request, body: ChatRequest, answer_id: str) -> Extras:
        """Read what a chat asks for."""
        chat = AskedChat([message.for_template() for message in body.messages], body.rendering())
        options = body.prompt_cache_options
        return cls(
            request,
            answer_id,
            explain=bool(body.radixkv and body.radixkv.explain),
            chat=chat,
            sections=chat_sections(request.app[SERVING].engine, chat, body.origin(request)),
            comparison_id=options.comparison_response_id if options is not None else None,
        )

    @classmethod
    def of_completion(cls, request: web.Request, body: CompletionRequest, answer_id: str) -> Extras:
        """Read what a completion asks for; raises InvalidRequest for several prompts at once."""
        explain = bool(body.radixkv and body.radixkv.explain)
        if explain and len(body.prompts) > 1:
            raise InvalidRequest(
                f"radixkv.explain is for one prompt, and there are {len(body.prompts)}",
                param="radixkv.explain",
            )
        return cls(request, answer_id, explain=explain)

    async def parts(self, streams: Sequence[Stream]) -> ExtraParts:
        """Return the fields to add, once the prompt of the one answer in ``streams`` is admitted.

        Also remembers the prompt, for later ones.
        """
        found: ExtraParts = {}
        (stream, *more), sections = streams, self._sections
        if stream.explained is not None and not more:
            nearest = None
            if sections is not None:
                nearest = self._memory.nearest(self._tenant, sections)
            record = await asyncio.to_thread(
                record_of,
                self._engine,
                stream.explained,
                stream.prompt_token_ids,
                self._chat,
                nearest,
            )
            record["lookups"] = [_lookup(lookup) for lookup in stream.lookups]
            found["radixkv"] = radixkv_reply(stream)
            found["radixkv"]["explain"] = record
        if sections is not None:
            if self._comparison_id is not None:
                found["prompt_cache_diagnostics"] = openai_diagnostics(
                    self._memory,
                    self._tenant,
                    self._comparison_id,
                    sections,
                    stream.usage,
                    enabled=self._engine.config.prefix_cache,
                )
            self._memory.remember(self._tenant, self._id, sections)
        return found


def chat_sections(engine: Engine, chat: AskedChat, origin: Origin) -> PromptSections:
    """Digest what a chat's prompt is made of."""
    return sections_of(
        model=f"{engine.model_name}:{origin.adapter}",
        messages=chat.messages,
        tools=chat.rendering.get("tools"),
        kwargs=chat.rendering.get("template_kwargs"),
        salt=origin.salt,
    )


def add_parts(reply: ChatReply | ChatChunk | CompletionReply, parts: ExtraParts) -> None:
    """Put the fields into an answer, or into an event of one."""
    if "radixkv" in parts:
        reply["radixkv"] = parts["radixkv"]
    if "prompt_cache_diagnostics" in parts:
        reply["prompt_cache_diagnostics"] = parts["prompt_cache_diagnostics"]


def _lookup(lookup: Lookup) -> LookupReply:
    return {
        "choice": lookup.choice,
        "resumed": lookup.resumed,
        "identity": lookup.identity_digest,
        "queried_tokens": lookup.queried_tokens,
        "device_tokens": lookup.device_tokens,
        "host_tokens": lookup.host_tokens,
        "stopped": lookup.stopped,
    }
