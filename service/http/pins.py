"""POST /v1/cache/pin, /unpin and /prewarm, GET /v1/cache/pins: prompts that stay, or come early.

Knows callers, prompts and times; what may be pinned, and what that costs, is the engine's affair. A
caller pins for its tenant and sees its tenant's pins; an admin sees and lets go everybody's.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from aiohttp import web

from radixkv.service.engine.keep import Keep
from radixkv.service.engine.params import Generation, SamplingParams
from radixkv.service.engine.pin_view import PinInfo
from radixkv.service.http.auth import Caller, caller_of
from radixkv.service.http.body import read_body
from radixkv.service.http.deltas import finish_word
from radixkv.service.http.dialects import read_either
from radixkv.service.http.errors import HttpError
from radixkv.service.http.marks import ttl_seconds
from radixkv.service.http.pins_schema import (
    PinBudgetReply,
    PinList,
    PinListed,
    PinMessageRequest,
    PinReply,
    PinRequest,
    PrewarmMessageRequest,
    PrewarmReply,
    PrewarmRequest,
    PromptRequest,
    UnpinReply,
    UnpinRequest,
)
from radixkv.service.http.queries import check_names
from radixkv.service.http.replies import radixkv_reply
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import json_reply

_Body = PromptRequest | PinMessageRequest | PrewarmMessageRequest

_NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0)
"""One token is drawn, from what the prompt's last token costs anyway, and nobody sees it."""


async def pin(request: web.Request) -> web.Response:
    """Compute a prompt, as far as it is not resident, and pin it."""
    serving = request.app[SERVING]
    body = await read_either(request, PinRequest, PinMessageRequest)
    config = serving.engine.config
    if config.force_miss or not config.prefix_cache:
        raise HttpError(
            409,
            "this server runs without a prefix cache, or lets every look-up miss: nothing can be "
            "pinned",
            code="prefix_cache_off",
        )
    ids, _ = await _prompt(serving, body)
    ttl_s = None if body.ttl is None else ttl_seconds(body.ttl)
    keep = Keep(len(ids), ttl_s, body.name)
    done = await _compute(request, serving, body, ids, (keep,))
    (kept,) = done.kept
    budget = await _budget(serving, caller_of(request))
    if kept.pin_id is None:
        raise HttpError(
            409,
            f"nothing of these {len(ids)} tokens was pinned: your pins may hold "
            f"{budget['blocks']} blocks of {serving.engine.config.block_size} tokens and hold "
            f"{budget['used_blocks']}; unpin what is not needed, or start the server with a larger "
            "--pin-budget or more --kv-memory",
            code="pin_budget_exceeded",
        )
    reply: PinReply = {
        "object": "cache.pin",
        "id": kept.pin_id,
        "name": body.name,
        "pinned_tokens": kept.granted_tokens,
        "wanted_tokens": len(ids),
        "cached_tokens": done.usage.cached_tokens,
        "ttl_s": ttl_s,
        "expires_at": None if ttl_s is None else int(time.time() + ttl_s),
        "budget": budget,
    }
    return json_reply(reply)


async def unpin(request: web.Request) -> web.Response:
    """Let a pin go by its id, or by the name that the caller's tenant gave it."""
    serving, caller = request.app[SERVING], caller_of(request)
    body = await read_body(request, UnpinRequest)
    owner = None if caller.is_admin and body.id is not None else caller.tenant
    ids = await asyncio.to_thread(serving.engine.pins.unpin, owner, pin_id=body.id, name=body.name)
    if not ids:
        param = "id" if body.id is not None else "name"
        raise HttpError(
            404,
            f"you have no pin of this {param}; GET /v1/cache/pins lists those that there are",
            code="pin_not_found",
            param=param,
        )
    reply: UnpinReply = {"object": "cache.unpin", "ids": ids}
    return json_reply(reply)


async def list_pins(request: web.Request) -> web.Response:
    """List the pins of the caller's tenant, or everybody's for an admin."""
    check_names(request, ())
    serving, caller = request.app[SERVING], caller_of(request)
    owner = None if caller.is_admin else caller.tenant
    pins = await asyncio.to_thread(serving.engine.pins.of, owner)
    reply: PinList = {
        "object": "list",
        "data": [_listed(pin, caller) for pin in pins],
        "budget": await _budget(serving, caller),
    }
    return json_reply(reply)


async def prewarm(request: web.Request) -> web.Response:
    """Compute a prompt without an answer, and say so when it is resident."""
    serving = request.app[SERVING]
    body = await read_either(request, PrewarmRequest, PrewarmMessageRequest)
    ids, keeps = await _prompt(serving, body)
    done = await _compute(request, serving, body, ids, keeps)
    resident = await asyncio.to_thread(
        serving.engine.cache.lookup, ids, origin=body.origin(request)
    )
    reply: PrewarmReply = {
        "object": "cache.prewarm",
        "prompt_tokens": len(ids),
        "cached_tokens": done.usage.cached_tokens,
        "resident_tokens": resident,
        "radixkv": radixkv_reply(done),
    }
    return json_reply(reply)


async def _prompt(serving: Serving, body: _Body) -> tuple[list[int], tuple[Keep, ...]]:
    """Return the prompt's token ids, and what of them its breakpoints want to keep."""
    serving.check_model(body.model)
    chat = body.chat()
    if chat is not None:
        messages, marks = chat
        serving.check_length("".join(str(m.content) for m in messages), "messages")
        return await serving.render_marked(messages, body.rendering(), marks)
    assert isinstance(body, PromptRequest), "a chat without messages"
    prompt = body.prompt if body.prompt is not None else body.tokens or []
    serving.check_length(prompt, body.param)
    (ids,) = await serving.tokenize(
        [prompt], add_special_tokens=body.add_special_tokens is not False
    )
    return ids, ()


async def _compute(
    request: web.Request,
    serving: Serving,
    body: _Body,
    ids: list[int],
    keeps: tuple[Keep, ...],
) -> Generation:
    with serving.running(request):
        stream = serving.submit(
            request,
            ids,
            _NO_ANSWER,
            request_id=f"warm-{uuid.uuid4().hex}",
            origin=body.origin(request),
            param=body.param if isinstance(body, PromptRequest) else "messages",
            keeps=keeps,
        )
        done = await stream.aresult()
        finish_word(done.finish_reason)  # raises if the server stopped before it was computed
        return done


async def _budget(serving: Serving, caller: Caller) -> PinBudgetReply:
    budget = await asyncio.to_thread(serving.engine.pins.budget, caller.tenant)
    return {"blocks": budget.blocks, "used_blocks": budget.used_blocks}


def _listed(pin: PinInfo, caller: Caller) -> PinListed:
    listed: PinListed = {
        "object": "cache.pin",
        "id": pin.id,
        "name": pin.name if pin.owner == caller.tenant else None,
        "pinned_tokens": pin.tokens,
        "blocks": pin.blocks,
        "ttl_s": pin.ttl_s,
        "created_at": int(pin.created_at),
        "expires_at": None if pin.expires_at is None else int(pin.expires_at),
    }
    if caller.is_admin:
        listed["tenant"] = pin.owner
    return listed
