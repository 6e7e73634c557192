"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, whole and streamed.

Parses, renders, submits and writes; what its bodies mean and what its answers look like is said in
``anthropic_schema`` and ``anthropic_replies``. Shares prompts, blocks and limits with the chats of
OpenAI's clients: the same words are the same tokens by either way.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.service.engine.params import Choice, Delta, Generation
from radixkv.service.http.anthropic_replies import (
    MessageEvent,
    MessageReply,
    StopDelta,
    StopWord,
    TokenCount,
    message_usage,
)
from radixkv.service.http.anthropic_schema import CountTokensRequest, MessagesRequest, chat_of
from radixkv.service.http.body import read_body
from radixkv.service.http.deltas import deltas_of, finish_word, send_events
from radixkv.service.http.replies import radixkv_reply
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import EventStream, encode_json, json_reply

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream

_STOP_WORDS: dict[str, StopWord] = {"length": "max_tokens", "stop": "end_turn"}


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    serving = request.app[SERVING]
    body = await read_body(request, MessagesRequest)
    serving.check_model(body.model)
    params = body.sampling()
    messages, marks = chat_of(body)
    serving.check_length("".join(str(m.content) for m in messages), "messages")
    token_ids, keeps = await serving.render_marked(messages, body.rendering(), marks)
    answer = _Answer(serving)
    with serving.running(request):
        stream = serving.submit(
            request,
            token_ids,
            params,
            request_id=answer.id,
            origin=body.origin(request),
            param="messages",
            keeps=keeps,
        )
        if body.stream:
            return await send_events(
                request, serving, lambda events: answer.send(events, stream), NamedEvents
            )
        return json_reply(answer.whole(await stream.aresult()))


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens that the prompt of such a message has."""
    serving = request.app[SERVING]
    body = await read_body(request, CountTokensRequest)
    serving.check_model(body.model)
    messages, _ = chat_of(body)
    reply: TokenCount = {"input_tokens": len(await serving.render(messages, body.rendering()))}
    return json_reply(reply)


class NamedEvents(EventStream):
    """Events that have their type as a name too, and no end mark."""

    end = b""

    def encode(self, value: Any) -> bytes:
        """Return one event as it goes over the wire."""
        return f"event: {value['type']}\ndata: {encode_json(value)}\n\n".encode()


_PING: MessageEvent = {"type": "ping"}


class _Answer:
    """Writes one answer."""

    def __init__(self, serving: Serving) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = serving.engine.model_name
        self._serving = serving

    def whole(self, generation: Generation) -> MessageReply:
        """Build the answer that is not streamed."""
        (choice,) = generation.choices
        stop = _stop(choice)
        reply = self._message(generation)
        reply["content"] = [{"type": "text", "text": choice.text}]
        reply["stop_reason"], reply["stop_sequence"] = stop["stop_reason"], stop["stop_sequence"]
        reply["radixkv"] = radixkv_reply(generation)
        return reply

    async def send(self, events: EventStream, stream: Stream) -> None:
        """Write the answer as events. The first comes with the first token: only then it is known
        what of the prompt was cached."""
        begun = False
        async with aclosing(deltas_of([stream], self._serving.metrics)) as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    await self._begin(events, stream)
                if delta.text:
                    await _send(
                        events,
                        {
                            "type": "content_block_delta",
                            "index": 0,
                            "delta": {"type": "text_delta", "text": delta.text},
                        },
                    )
                if delta.finish_reason is not None:
                    await self._finish(events, stream, delta)

    async def _begin(self, events: EventStream, stream: Stream) -> None:
        await _send(events, {"type": "message_start", "message": self._message(stream)})
        await _send(
            events,
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
        )
        await _send(events, _PING)
        events.ping = events.encode(_PING)  # before, it would not be understood

    async def _finish(self, events: EventStream, stream: Stream, delta: Delta) -> None:
        await _send(events, {"type": "content_block_stop", "index": 0})
        await _send(
            events,
            {
                "type": "message_delta",
                "delta": _stop(delta),
                "usage": message_usage(stream.usage, stream.kept),
                "radixkv": radixkv_reply(stream),
            },
        )
        await _send(events, {"type": "message_stop"})

    def _message(self, answer: Generation | Stream) -> MessageReply:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(answer.usage, answer.kept),
        }


async def _send(events: EventStream, event: MessageEvent) -> None:
    await events.send(event)


def _stop(end: Choice | Delta) -> StopDelta:
    """Return Anthropic's words for how a choice ended."""
    assert end.finish_reason is not None, "it has not ended"
    word = _STOP_WORDS[finish_word(end.finish_reason)]
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": word, "stop_sequence": None}
