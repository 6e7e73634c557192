"""The shapes of answers, as OpenAI's clients expect them; the OpenAPI document is made from these.

Optional extras of vLLM (``stop_reason``, ``token_ids``, ``prompt_logprobs``) are marked NotRequired
where they are only sent on request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired

from typing_extensions import TypedDict

from radixkv.service.engine.params import Generation, Usage
from radixkv.service.http.beams import ScoredChoice
from radixkv.service.http.diagnostics import OpenAIDiagnostics
from radixkv.service.http.explain_shapes import ExplainRecord

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream

FinishWord = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """Where the prompt's KV came from."""

    cached_tokens: int


class UsageReply(TypedDict):
    """Tokens of a request. `cached_tokens` is always there, 0 on a miss."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RadixKV(TypedDict):
    """What this server promises beyond OpenAI's API.

    `deterministic`: the answer's bits depend on the request and the weights alone, not on what was
    cached, on other requests or on threads. `given_up_tokens`: cached tokens that were computed
    again to keep that promise. Only where the request has breakpoints: of the `wanted_tokens` up to
    the last of them, the first `pinned_tokens` stay resident.
    """

    deterministic: bool
    given_up_tokens: int
    pinned_tokens: NotRequired[int]
    wanted_tokens: NotRequired[int]
    explain: NotRequired[ExplainRecord]


class TopLogprob(TypedDict):
    """One likely token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobReply(TopLogprob):
    """The chosen token and its likeliest rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprobReply]
    refusal: None


class PromptLogprob(TypedDict):
    """vLLM's form of one candidate at a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionReply(TypedDict):
    """A function that the model calls; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCallReply(TypedDict):
    """A call, to be answered by a message of the role `tool` with its id."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class ChatMessage(TypedDict):
    """A whole answer; its `content` is null where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatChoice(ScoredChoice):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatReply(TypedDict):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    radixkv: RadixKV
    prompt_cache_diagnostics: NotRequired[OpenAIDiagnostics]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    """The name, once, or more of the arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What a chunk adds to the call of this index; its first chunk has id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What a chunk adds; the first of each index carries the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """What a chunk adds to one of the `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a streamed chat; the stream ends with `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageReply | None]
    radixkv: NotRequired[RadixKV]
    prompt_cache_diagnostics: NotRequired[OpenAIDiagnostics]
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    """The older form of log-probabilities; offsets count characters of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ScoredChoice):
    """One completion, or in a stream what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionReply(TypedDict):
    """The completions of all prompts, in order; also the form of a stream's events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[UsageReply | None]
    radixkv: NotRequired[RadixKV]
    prompt_cache_diagnostics: NotRequired[OpenAIDiagnostics]


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(TypedDict):
    """Token ids of a text or a chat."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class DetokenizeReply(TypedDict):
    """Text of token ids, under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


class HealthReply(TypedDict):
    """The engine serves."""

    status: Literal["ok"]


class VersionReply(TypedDict):
    """The running version."""

    version: str


class LoadReply(TypedDict):
    """Requests that run or wait."""

    server_load: int


def radixkv_reply(*answers: Generation | Stream) -> RadixKV:
    """Say of one or several prompts, answered by one engine, what the engine promised of them."""
    reply: RadixKV = {
        "deterministic": all(answer.deterministic for answer in answers),
        "given_up_tokens": sum(answer.usage.given_up_tokens for answer in answers),
    }
    for kept in [answer.kept for answer in answers if answer.kept]:
        reply["pinned_tokens"] = max(one.granted_tokens for one in kept)
        reply["wanted_tokens"] = max(one.keep.num_tokens for one in kept)
    return reply


def usage_reply(*parts: Usage) -> UsageReply:
    """Sum the usage of one or several prompts."""
    prompt = sum(u.prompt_tokens for u in parts)
    completion = sum(u.completion_tokens for u in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in parts)},
    }
