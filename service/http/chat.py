"""POST /v1/chat/completions: parse, render, submit, and write the answer whole or bit by bit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.service.engine.params import Delta, Generation
from radixkv.service.http.beams import add_score
from radixkv.service.http.body import read_body
from radixkv.service.http.deltas import deltas_of, finish_word, send_events
from radixkv.service.http.extras import Extras, add_parts
from radixkv.service.http.logprobs import chat_logprobs, prompt_logprobs
from radixkv.service.http.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    ToolCallDelta,
    radixkv_reply,
    usage_reply,
)
from radixkv.service.http.schema import ChatRequest
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import EventStream, json_reply
from radixkv.service.http.tools_plan import AnswerReader, ToolPlan, plan_tools
from radixkv.service.tools_pieces import CallArguments, CallStart, Piece, Text

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    serving = request.app[SERVING]
    body = await read_body(request, ChatRequest)
    serving.check_model(body.model)
    asked = body.sampling()
    serving.check_length("".join(str(m.content) for m in body.messages), "messages")
    plan, params = plan_tools(serving.engine.prompting, body.calling(), asked)
    token_ids, keeps = await serving.render_marked(body.messages, body.rendering(), body.marks())
    answer = ChatAnswer(serving, body, plan)
    extras = Extras.of_chat(request, body, answer.id)
    field = body.form_field if params.grammar is asked.grammar else "tools"
    await serving.compile_grammar(request, params, field)
    with serving.running(request):
        stream = serving.submit(
            request,
            token_ids,
            params,
            request_id=answer.id,
            origin=body.origin(request),
            param="messages",
            keeps=keeps,
            explain=extras.explain,
        )
        if body.stream:
            return await send_events(
                request, serving, lambda events: answer.send(events, stream, extras)
            )
        reply = answer.whole(await stream.aresult())
        add_parts(reply, await extras.parts([stream]))
        return json_reply(reply)


class ChatAnswer:
    """Writes one answer; everything that is the same in all its parts is fixed here."""

    def __init__(self, serving: Serving, body: ChatRequest, plan: ToolPlan) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = serving.models.shown(body.model)
        self._serving = serving
        self._body = body
        self._plan = plan

    def whole(self, generation: Generation) -> ChatReply:
        """Build the answer that is not streamed."""
        choices: list[ChatChoice] = []
        for choice in generation.choices:
            answer = self._plan.answer(choice.text)
            message: ChatMessage = {
                "role": "assistant",
                "content": answer.text if answer.text or not answer.calls else None,
                "refusal": None,
            }
            if answer.calls:
                message["tool_calls"] = [
                    {
                        "id": _call_id(),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in answer.calls
                ]
            part: ChatChoice = {
                "index": choice.index,
                "message": message,
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": finish_word(choice.finish_reason, calls=len(answer.calls)),
                "stop_reason": choice.stop_reason,
            }
            add_score(part, choice)
            if self._body.return_token_ids:
                part["token_ids"] = list(choice.token_ids)
            choices.append(part)
        reply: ChatReply = {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage_reply(generation.usage),
            "radixkv": radixkv_reply(generation),
        }
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                generation.prompt_logprobs, self._body.prompt_logprobs
            )
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = list(generation.prompt_token_ids)
        return reply

    async def send(self, events: EventStream, stream: Stream, extras: Extras) -> None:
        """Write the answer as events."""
        readers: dict[int, AnswerReader] = {}
        async with aclosing(deltas_of([stream], self._serving.metrics)) as deltas:
            async for index, delta in deltas:
                if index not in readers:
                    first = self._chunk([_part(index, {"role": "assistant", "content": ""})])
                    if self._body.return_token_ids and not readers:
                        first["prompt_token_ids"] = list(stream.prompt_token_ids)
                    if not readers:
                        add_parts(first, await extras.parts([stream]))
                    readers[index] = self._plan.reader()
                    await events.send(first)
                for part in self._parts(index, delta, readers[index]):
                    await events.send(self._chunk([part]))
        if self._body.include_usage:
            last = self._chunk([])
            last["usage"] = usage_reply(stream.usage)
            last["radixkv"] = radixkv_reply(stream)
            await events.send(last)

    def _parts(self, index: int, delta: Delta, reader: AnswerReader) -> Iterator[ChatChunkChoice]:
        """Yield what ``delta`` adds: a chunk for each piece; the last one has all the rest."""
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.close()
        added = [one for piece in pieces if (one := _added(piece)) is not None]
        yield from (_part(index, one) for one in added[:-1])
        held = self._plan.how is not None and not added and delta.finish_reason is None
        if held and delta.logprobs is None and not self._body.return_token_ids:
            return
        part = _part(index, added[-1] if added else {})
        part["logprobs"] = chat_logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            part["finish_reason"] = finish_word(delta.finish_reason, calls=reader.calls)
            part["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            part["token_ids"] = list(delta.token_ids)
        yield part

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk


def _part(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _added(piece: Piece) -> ChatDelta | None:
    """Return what a piece adds to the message."""
    match piece:
        case Text(text):
            return {"content": text}
        case CallStart(index, name):
            call: ToolCallDelta = {
                "index": index,
                "id": _call_id(),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
