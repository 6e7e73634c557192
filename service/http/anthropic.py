"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, whole and streamed.

Parses, renders, submits and writes; what its bodies mean and what its answers look like is said in
``anthropic_schema`` and ``anthropic_replies``. Shares prompts, blocks and limits with the chats of
OpenAI's clients: the same words are the same tokens by either way.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from radixkv.service.engine.params import Choice, Delta
from radixkv.service.http.anthropic_events import Blocks, call_id
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
from radixkv.service.http.diagnostics import anthropic_diagnostics
from radixkv.service.http.explaining import AskedChat
from radixkv.service.http.extras import PROMPTS, Extras, chat_sections
from radixkv.service.http.messages import Message
from radixkv.service.http.replies import radixkv_reply
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import EventStream, encode_json, json_reply
from radixkv.service.http.tools_plan import ToolPlan, plan_tools

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream

_STOP_WORDS: dict[str, StopWord] = {
    "length": "max_tokens",
    "stop": "end_turn",
    "tool_calls": "tool_use",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    serving = request.app[SERVING]
    body = await read_body(request, MessagesRequest)
    serving.check_model(body.model)
    messages, marks = chat_of(body)
    serving.check_length("".join(str(m.content) for m in messages), "messages")
    plan, params = plan_tools(serving.engine.prompting, body.calling(), body.sampling())
    token_ids, keeps = await serving.render_marked(messages, body.rendering(), marks)
    await serving.compile_grammar(request, params, "tools")
    answer = _Answer(request, body, messages, plan)
    with serving.running(request):
        stream = serving.submit(
            request,
            token_ids,
            params,
            request_id=answer.id,
            origin=body.origin(request),
            param="messages",
            keeps=keeps,
            explain=answer.extras.explain,
        )
        if body.stream:
            return await send_events(
                request, serving, lambda events: answer.send(events, stream), NamedEvents
            )
        return json_reply(await answer.whole(stream))


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

    def __init__(
        self,
        request: web.Request,
        body: MessagesRequest,
        messages: Sequence[Message],
        plan: ToolPlan,
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._serving = request.app[SERVING]
        self._model = self._serving.models.shown(body.model)
        chat = AskedChat([message.for_template() for message in messages], body.rendering())
        origin = body.origin(request)
        self._sections = chat_sections(self._serving.engine, chat, origin)
        self.extras = Extras(
            request,
            self.id,
            explain=bool(body.radixkv and body.radixkv.explain),
            chat=chat,
            sections=self._sections,
        )
        self._previous = body.diagnostics
        self._memory = request.app[PROMPTS]
        self._tenant = origin.tenant
        self._plan = plan

    async def whole(self, stream: Stream) -> MessageReply:
        """Wait for the answer, and build it whole."""
        generation = await stream.aresult()
        (choice,) = generation.choices
        answer = self._plan.answer(choice.text)
        stop = _stop(choice, len(answer.calls))
        reply = await self._message(stream)
        if answer.text or not answer.calls:
            reply["content"] = [{"type": "text", "text": answer.text}]
        reply["content"] += [
            {"type": "tool_use", "id": call_id(), "name": c.name, "input": json.loads(c.arguments)}
            for c in answer.calls
        ]
        reply["stop_reason"], reply["stop_sequence"] = stop["stop_reason"], stop["stop_sequence"]
        return reply

    async def send(self, events: EventStream, stream: Stream) -> None:
        """Write the answer as events. The first comes with the first token: only then it is known
        what of the prompt was cached."""
        blocks, reader, begun = Blocks(), self._plan.reader(), False
        async with aclosing(deltas_of([stream], self._serving.metrics)) as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    start: MessageEvent = {
                        "type": "message_start",
                        "message": await self._message(stream),
                    }
                    # Where there are no tools it is known what the first block will be.
                    first = [] if self._plan.how is not None else blocks.open_text()
                    await _send(events, start, *first, _PING)
                    events.ping = events.encode(_PING)  # before, it would not be understood
                await _send(events, *blocks.add(reader.push(delta.text)))
                if delta.finish_reason is not None:
                    await _send(events, *blocks.add(reader.close()), *blocks.close())
                    await self._finish(events, stream, delta, reader.calls)

    async def _finish(self, events: EventStream, stream: Stream, delta: Delta, calls: int) -> None:
        usage = message_usage(stream.usage, stream.kept)
        await _send(
            events,
            {"type": "message_delta", "delta": _stop(delta, calls), "usage": usage},
            {"type": "message_stop"},
        )

    async def _message(self, stream: Stream) -> MessageReply:
        """Build what is known of the answer once its prompt is computed."""
        reply: MessageReply = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(stream.usage, stream.kept),
            "radixkv": radixkv_reply(stream),
        }
        if self._previous is not None:
            reply["diagnostics"] = anthropic_diagnostics(
                self._memory,
                self._tenant,
                self._previous.previous_message_id,
                self._sections,
                stream.usage,
            )
        parts = await self.extras.parts([stream])
        if "radixkv" in parts:
            reply["radixkv"] = parts["radixkv"]
        return reply


async def _send(events: EventStream, *several: MessageEvent) -> None:
    for event in several:
        await events.send(event)


def _stop(end: Choice | Delta, calls: int) -> StopDelta:
    """Return Anthropic's words for how a choice with so many calls ended."""
    assert end.finish_reason is not None, "it has not ended"
    word = _STOP_WORDS[finish_word(end.finish_reason, calls=calls)]
    if isinstance(end.stop_reason, str) and word != "tool_use":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": word, "stop_sequence": None}
