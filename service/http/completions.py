"""POST /v1/completions: one or many prompts, as text or token ids, answered as one.

Choice i of prompt p has index p * n + i, as OpenAI numbers them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.service.engine.params import Choice, Delta, Generation, TokenLogprob, Usage
from radixkv.service.http.beams import add_score
from radixkv.service.http.body import read_body
from radixkv.service.http.deltas import deltas_of, finish_word, gather, send_events
from radixkv.service.http.extras import ExtraParts, Extras, add_parts
from radixkv.service.http.logprobs import TextOffsets, echoed_logprobs, joined, prompt_logprobs
from radixkv.service.http.replies import (
    CompletionReply,
    TextChoice,
    TextLogprobs,
    radixkv_reply,
    usage_reply,
)
from radixkv.service.http.schema import CompletionRequest
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.sse import EventStream, json_reply

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete prompts."""
    serving = request.app[SERVING]
    body = await read_body(request, CompletionRequest)
    serving.check_model(body.model)
    params = body.sampling()
    serving.check_choices(len(body.prompts), params.num_sequences)
    for prompt in body.prompts:
        serving.check_length(prompt, "prompt")
    prompts = await serving.tokenize(
        body.prompts, add_special_tokens=body.add_special_tokens is not False
    )
    answer = CompletionAnswer(serving, body)
    extras = Extras.of_completion(request, body, answer.id)
    await serving.compile_grammar(request, params, body.form_field)
    if body.echo:
        answer.echoes = await serving.detokenize(body.prompts)
    with serving.running(request):
        serving.admit(request, prompts, params.num_sequences)
        streams = []
        for i, token_ids in enumerate(prompts):
            if i:
                await asyncio.sleep(0)  # a long list must not hold up other requests
            streams.append(
                serving.submit(
                    request,
                    token_ids,
                    params,
                    request_id=f"{answer.id}-{i}",
                    origin=body.origin(request),
                    param="prompt",
                    explain=extras.explain,
                )
            )
        if body.stream:
            return await send_events(
                request, serving, lambda events: answer.send(events, streams, extras)
            )
        reply = answer.whole(await gather(streams))
        add_parts(reply, await extras.parts(streams))
        return json_reply(reply)


class CompletionAnswer:
    """Writes one answer; everything that is the same in all its parts is fixed here."""

    def __init__(self, serving: Serving, body: CompletionRequest) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.echoes: list[str] = []
        """The text of each prompt, if it is to be echoed."""
        self._extra: ExtraParts = {}
        """What the next chunk is to carry beside its choices."""
        self._created = int(time.time())
        self._serving = serving
        self._body = body
        self._n = body.n or 1

    def whole(self, generations: Sequence[Generation]) -> CompletionReply:
        """Build the answer that is not streamed."""
        reply = self._chunk(
            [
                self._choice(p, generation, choice)
                for p, generation in enumerate(generations)
                for choice in generation.choices
            ]
        )
        reply["usage"] = usage_reply(*(self._usage(g.usage) for g in generations))
        reply["radixkv"] = radixkv_reply(*generations)
        return reply

    async def send(self, events: EventStream, streams: Sequence[Stream], extras: Extras) -> None:
        """Write the answer as events."""
        offsets: dict[int, TextOffsets] = {}
        async with aclosing(deltas_of(streams, self._serving.metrics)) as deltas:
            async for index, delta in deltas:
                if not offsets:
                    self._extra = await extras.parts(streams)
                if index not in offsets:
                    stream = streams[index // self._n]
                    echo = self._echo(index // self._n)
                    offsets[index] = TextOffsets(len(echo))
                    if self.echoes or self._body.return_token_ids:
                        await events.send(self._chunk([self._head(index, echo, stream)]))
                if self._body.scores_only and delta.finish_reason is None:
                    continue
                await events.send(self._chunk([self._delta(index, delta, offsets[index])]))
        if self._body.include_usage:
            last = self._chunk([])
            last["usage"] = usage_reply(*(self._usage(stream.usage) for stream in streams))
            last["radixkv"] = radixkv_reply(*streams)
            await events.send(last)

    def _choice(self, p: int, generation: Generation, choice: Choice) -> TextChoice:
        echo = self._echo(p)
        part: TextChoice = {
            "index": p * self._n + choice.index,
            "text": echo,
            "logprobs": self._echoed(echo, generation.prompt_token_ids, generation.prompt_logprobs),
            "finish_reason": finish_word(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        add_score(part, choice)
        if self._body.scores_only:
            part["finish_reason"], part["stop_reason"] = "length", None
        else:
            part["text"] += choice.text
            own = TextOffsets(len(echo)).write(choice.logprobs)
            before = part["logprobs"]
            part["logprobs"] = own if before is None else joined(before, own)
        if self._body.return_token_ids:
            part["prompt_token_ids"] = list(generation.prompt_token_ids)
            part["token_ids"] = [] if self._body.scores_only else list(choice.token_ids)
        if self._body.prompt_logprobs is not None:
            part["prompt_logprobs"] = prompt_logprobs(
                generation.prompt_logprobs, self._body.prompt_logprobs
            )
        return part

    def _head(self, index: int, echo: str, stream: Stream) -> TextChoice:
        """Build the part that comes before a choice's first token."""
        ids = stream.prompt_token_ids
        part: TextChoice = {
            "index": index,
            "text": echo,
            "logprobs": self._echoed(echo, ids, stream.prompt_logprobs),
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            part["prompt_token_ids"] = list(ids)
        return part

    def _delta(self, index: int, delta: Delta, offsets: TextOffsets) -> TextChoice:
        part: TextChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": offsets.write(delta.logprobs),
            "finish_reason": None,
        }
        if delta.finish_reason is not None:
            part["finish_reason"] = finish_word(delta.finish_reason)
            part["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            part["token_ids"] = list(delta.token_ids)
        if self._body.scores_only:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        return part

    def _echo(self, p: int) -> str:
        return self.echoes[p] if self.echoes else ""

    def _echoed(
        self, echo: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None
    ) -> TextLogprobs | None:
        top = self._body.logprobs
        if not self._body.echo or top is None or entries is None:
            return None
        return echoed_logprobs(token_ids, entries, echo, self._serving.engine.token_text, top)

    def _usage(self, usage: Usage) -> Usage:
        """Return what the client got: scoring a prompt draws a token that nobody sees."""
        if not self._body.scores_only:
            return usage
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens)

    def _chunk(self, choices: list[TextChoice]) -> CompletionReply:
        chunk: CompletionReply = {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._serving.models.shown(self._body.model),
            "choices": choices,
        }
        if self._body.include_usage and self._body.stream:
            chunk["usage"] = None
        if self._extra:
            add_parts(chunk, self._extra)
            self._extra = {}
        return chunk
