"""POST /tokenize and /detokenize: the same ids that a generation would be run on."""

from __future__ import annotations

from aiohttp import web

from radixkv.service.http.body import read_body
from radixkv.service.http.replies import DetokenizeReply, TokenizeReply
from radixkv.service.http.schema import DetokenizeRequest, TokenizeRequest
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply


async def tokenize(request: web.Request) -> web.Response:
    """Turn a prompt, a chat or llama.cpp's ``content`` into token ids."""
    serving = request.app[SERVING]
    body = await read_body(request, TokenizeRequest)
    serving.check_model(body.model)
    if body.messages is not None:
        ids = await serving.render(body.messages, body.rendering())
    else:
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if special is None:
            special = body.prompt is not None
        text = body.prompt if body.prompt is not None else body.content or ""
        (ids,) = await serving.tokenize([text], add_special_tokens=special)
    reply: TokenizeReply = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": serving.engine.max_model_len,
    }
    if body.return_token_strs:
        reply["token_strs"] = [serving.engine.token_text.token_text(i) for i in ids]
    return json_reply(reply)


async def detokenize(request: web.Request) -> web.Response:
    """Turn token ids into text, special tokens included."""
    serving = request.app[SERVING]
    body = await read_body(request, DetokenizeRequest)
    serving.check_model(body.model)
    (text,) = await serving.detokenize([body.tokens]) if body.tokens else ("",)
    reply: DetokenizeReply = {"prompt": text, "content": text}
    return json_reply(reply)
