"""What a line of a batch means: from its body to prompts and parameters, from answers to a reply.

Bodies are read by the models that read them over HTTP, and replies built by what builds them there,
so a line is answered as its request would be. Knows nothing of files, order or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from radixkv.errors import InvalidRequest
from radixkv.service.batch.lines import CHAT_URL, Line
from radixkv.service.batch.plan import Prompt
from radixkv.service.engine.origin import LOCAL_TENANT, Origin
from radixkv.service.engine.params import Generation, SamplingParams
from radixkv.service.http.chat import ChatAnswer
from radixkv.service.http.completions import CompletionAnswer
from radixkv.service.http.faults import explain
from radixkv.service.http.schema import ChatRequest, CompletionRequest
from radixkv.service.http.serving import Serving
from radixkv.service.http.tools_plan import ToolPlan, plan_tools
from radixkv.tokens import encode

if TYPE_CHECKING:
    from radixkv.service.http.fields import GenerationFields

_TALK_TOKENS = 1024
"""What an answer without a limit is taken to be, for the order."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One line, understood."""

    line: Line
    body: ChatRequest | CompletionRequest
    params: SamplingParams
    origin: Origin
    plan: ToolPlan = ToolPlan()

    @property
    def num_prompts(self) -> int:
        """Prompts of the line; a chat is one."""
        return 1 if isinstance(self.body, ChatRequest) else len(self.body.prompts)

    @property
    def param(self) -> str:
        """The field that holds the prompt."""
        return "messages" if isinstance(self.body, ChatRequest) else "prompt"


class Asks:
    """Reads lines for one server, or for the command line, in the name of one tenant."""

    def __init__(self, serving: Serving, tenant: str = LOCAL_TENANT) -> None:
        self._serving = serving
        self._tenant = tenant

    def parse(self, line: Line) -> Ask:
        """Understand a line; raises RadixKVError as the route would.

        What marks prefixes to stay resident is checked and not followed: the order of the batch
        keeps them for as long as they are needed. ``priority`` and ``service_tier`` change nothing.
        """
        kind = ChatRequest if line.url == CHAT_URL else CompletionRequest
        try:
            body = kind.model_validate(line.body)
        except ValidationError as e:
            raise explain(e) from None
        self._serving.check_model(body.model)
        params = body.sampling()
        _refuse_online(body)
        plan = ToolPlan()
        if isinstance(body, ChatRequest):
            prompting = self._serving.engine.prompting
            plan, params = plan_tools(prompting, body.calling(), params)
            body.marks()
            text = "".join(str(message.content) for message in body.messages)
            self._serving.check_length(text, "messages")
        else:
            self._serving.check_choices(len(body.prompts), params.num_sequences)
            for prompt in body.prompts:
                self._serving.check_length(prompt, "prompt")
        origin = Origin(
            tenant=self._tenant,
            salt=body.cache_salt,
            batch=True,
            cache_key=body.prompt_cache_key or None,
            adapter=self._serving.models.adapter_of(body.model),
        )
        return Ask(line, body, params, origin, plan)

    def prompts(self, ask: Ask) -> list[Prompt]:
        """Render and tokenize, and compile the grammar, if any; raises InvalidRequest."""
        engine, body, params = self._serving.engine, ask.body, ask.params
        if isinstance(body, ChatRequest):
            shown = [message.for_template() for message in body.messages]
            found: list[Sequence[int]] = [engine.render(shown, **body.rendering())]
        else:
            tokenize = partial(
                engine.tokenize, add_special_tokens=body.add_special_tokens is not False
            )
            found = [tokenize(p) if isinstance(p, str) else p for p in body.prompts]
        for ids in found:
            engine.prompting.check_ids(ids, ask.param)
        if params.grammar is not None:  # here, in a thread, and once for all lines that share it
            engine.grammars.compiled(params.grammar, ask.origin.tenant)
        adapter, salt = ask.origin.adapter, ask.origin.salt
        group = repr((adapter, salt)).encode() if adapter or salt else b""
        answer_tokens = params.num_sequences * min(params.max_tokens or _TALK_TOKENS, 2**20)
        return [
            Prompt(
                group,
                encode(ids),
                ask.line.number,
                ask.line.offset,
                index,
                answer_tokens,
                params.num_sequences,
                params.prompt_logprobs is None,
            )
            for index, ids in enumerate(found)
        ]

    def reply(self, ask: Ask, generations: Sequence[Generation]) -> dict[str, Any]:
        """Build the body of the answer; raises Aborted if a prompt was given up."""
        body, serving = ask.body, self._serving
        if isinstance(body, ChatRequest):
            return dict(ChatAnswer(serving, body, ask.plan).whole(generations[0]))
        answer = CompletionAnswer(serving, body)
        if body.echo:
            detokenize = serving.engine.detokenize
            answer.echoes = [p if isinstance(p, str) else detokenize(p) for p in body.prompts]
        return dict(answer.whole(generations))


def _refuse_online(body: GenerationFields) -> None:
    """Refuse what makes sense only while somebody listens."""
    if body.stream:
        raise InvalidRequest("a batch's answers cannot be streamed", param="stream")
    if body.radixkv is not None and body.radixkv.explain:
        raise InvalidRequest("radixkv.explain is not for batches", param="radixkv.explain")
