"""/v1/cache/public: the prompts that all tenants share. For admins, since it concerns everybody.

What an admin declares here is found by every tenant whose prompt begins with it, up to its last
token and no further; whoever can send prompts can learn by the time that it was declared.
"""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import Literal

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from radixkv.errors import NotFound
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.public_prompts import PublicPrompt, chat_prefix
from radixkv.service.http.auth import caller_of, only_admins, require_admin
from radixkv.service.http.body import read_body
from radixkv.service.http.pins_schema import PromptRequest
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import json_reply

_NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0)


class PublicRequest(PromptRequest):
    """The body of `POST /v1/cache/public`: messages with which chats begin, text or token ids."""

    name: str | None = Field(None, min_length=1, max_length=128, description="For your own lists.")


class PublicReply(TypedDict):
    """One public prompt; `resident_tokens` of its `tokens` are cached now."""

    object: Literal["cache.public"]
    id: str
    name: str | None
    tokens: int
    blocks: int
    resident_tokens: int
    created: int


class PublicList(TypedDict):
    """All public prompts."""

    object: Literal["list"]
    data: list[PublicReply]


class PublicDeleted(TypedDict):
    """A public prompt is withdrawn."""

    object: Literal["cache.public.deleted"]
    id: str
    deleted: Literal[True]


async def declare_public(request: web.Request) -> web.Response:
    """Declare a prompt public and compute it; answers when it is resident."""
    require_admin(request)
    serving = request.app[SERVING]
    body = await read_body(request, PublicRequest)
    serving.check_model(body.model)
    ids = await asyncio.to_thread(_tokens_of, serving, body)
    serving.check_length(ids, body.param)
    public = serving.engine.public
    prompt = await asyncio.to_thread(public.declare, ids, body.name)
    with serving.running(request):
        # Under a salt of its own, so that nothing private of the caller's is read or filled.
        origin = Origin(tenant=caller_of(request).tenant, salt=f"public-{uuid.uuid4().hex}")
        stream = serving.submit(
            request, ids, _NO_ANSWER, request_id=prompt.id, origin=origin, param=body.param
        )
        await stream.aresult()
    return json_reply(_reply(await asyncio.to_thread(public.show, prompt.id)))


async def list_public(request: web.Request) -> web.Response:
    """List what is public."""
    only_admins(request)
    prompts = await asyncio.to_thread(request.app[SERVING].engine.public.list)
    reply: PublicList = {"object": "list", "data": [_reply(prompt) for prompt in prompts]}
    return json_reply(reply)


async def withdraw_public(request: web.Request) -> web.Response:
    """Withdraw a public prompt: from now on each tenant has its own again."""
    require_admin(request)
    prompt_id = request.match_info["id"]
    if not await asyncio.to_thread(request.app[SERVING].engine.public.withdraw, prompt_id):
        raise NotFound("there is no public prompt of this id; GET /v1/cache/public lists all")
    reply: PublicDeleted = {"object": "cache.public.deleted", "id": prompt_id, "deleted": True}
    return json_reply(reply)


def _tokens_of(serving: Serving, body: PublicRequest) -> list[int]:
    """Return the tokens up to the border."""
    engine = serving.engine
    if body.tokens is not None:
        return body.tokens
    if body.prompt is not None:
        return engine.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    shown = [message.for_template() for message in body.messages or ()]
    render = partial(engine.render, tools=body.shown_tools)
    return chat_prefix(render, shown, body.chat_template_kwargs)


def _reply(prompt: PublicPrompt) -> PublicReply:
    return {
        "object": "cache.public",
        "id": prompt.id,
        "name": prompt.name,
        "tokens": prompt.num_tokens,
        "blocks": prompt.num_blocks,
        "resident_tokens": prompt.resident_tokens,
        "created": int(prompt.created_at),
    }
