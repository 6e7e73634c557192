"""The shapes of single request fields, and the parts that both generation routes share.

Knows JSON types and limits; the meaning of a value is ``SamplingParams``'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from radixkv.errors import InvalidRequest
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import MAX_CHOICES, MAX_LOGPROBS
from radixkv.service.http.auth import caller_of
from radixkv.service.http.beams import BeamFields
from radixkv.service.http.model_ids import MODEL_IDS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of one string; what is prepared and remembered for it grows with its length."""
MAX_BIASES = 1024


def _stop_list(value: object) -> object:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("wanted a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} strings; at most {MAX_STOPS} are accepted")
    if any(len(s) > MAX_STOP_CHARS for s in stops):
        raise ValueError(f"has a string of more than {MAX_STOP_CHARS} characters")
    return stops


Stop = Annotated[str | list[str] | None, BeforeValidator(_stop_list)]
"""Becomes a list."""


OpenAITier = Literal["auto", "default", "flex", "scale", "priority", "batch"]
AnthropicTier = Literal["auto", "standard_only", "batch"]
TIERS = (
    "`batch` yields to all other work, and to what it keeps in the cache; the other words, which "
    "clients send, are all the same here."
)


class Strict(BaseModel):
    """No silent conversions: ``"5"`` is no number. Unknown fields are kept, to be looked at."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream carries beside the answer."""

    include_usage: bool | None = Field(
        None, description="Send one last chunk with the usage; all others have `usage: null`."
    )


class RadixKVOptions(Strict):
    """What an answer is to carry beyond OpenAI's API."""

    explain: bool | None = Field(
        None,
        description="Answer `radixkv.explain` too, in a stream with the first event: how much of "
        "the prompt was cached and why not the rest, as `POST /v1/cache/explain` has it.",
    )


def need_one_of(body: BaseModel, *names: str) -> None:
    """Raise ValueError unless just one of these fields of ``body`` is given."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        *others, last = names
        got = " and ".join(given) or "none"
        raise ValueError(f"wanted exactly one of {', '.join(others)} and {last}; got {got}")


def one_of(body: BaseModel, *names: str) -> str:
    """Return which of these fields, just one of which is given, it is."""
    return next(name for name in names if getattr(body, name) is not None)


class OriginFields(Strict):
    """What every route that brings a prompt to the engine accepts beside the prompt."""

    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Requests share cached prefixes only with requests of the same salt.",
    )
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower goes first among your own; default 0."
    )
    service_tier: OpenAITier | AnthropicTier | None = Field(None, description=TIERS)
    prompt_cache_key: str | None = Field(
        None,
        max_length=1024,
        description="A label by which `/v1/cache/stats` can report; it shares nothing by itself.",
    )

    def origin(self, request: web.Request) -> Origin:
        """Return who asks, as authentication has it, and how urgently, as the body has it."""
        return Origin(
            tenant=caller_of(request).tenant,
            salt=self.cache_salt,
            priority=self.priority or 0,
            batch=self.service_tier == "batch",
            cache_key=self.prompt_cache_key or None,
            adapter=request.app[MODEL_IDS].adapter_of(getattr(self, "model", None)),
        )


class GenerationFields(OriginFields, BeamFields):
    """What both of OpenAI's generation routes accept."""

    model: str | None = Field(
        None,
        description="The served model's id, or `<that>:<name>` for an adapter of it. Left out, "
        "empty or `default`: the served model.",
    )
    service_tier: OpenAITier | None = Field(None, description=TIERS)
    max_tokens: int | None = Field(None, ge=0, description="Tokens to generate a choice.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices; default 1.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**64, description="Choice i draws from (seed, i)."
    )
    stop: Stop = Field(None, description="Up to 16 strings that end a choice, never shown.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, description="Token id (as text) -> bias."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    # vLLM's extensions, under its names
    top_k: int | None = Field(None, ge=-1, description="0 or -1 keeps every token.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=256)
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probabilities of the prompt's tokens; not with `stream`. Such a request "
        "reads nothing from the cache.",
    )
    return_token_ids: bool | None = Field(
        None, description="Also answer `prompt_token_ids` and each choice's `token_ids`."
    )
    radixkv: RadixKVOptions | None = None

    def common_sampling(self) -> dict[str, Any]:
        """Return the fields that ``SamplingParams`` has by the same name and that were given."""
        given = {
            name: value
            for name in (
                "temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty",
                "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        given["stop"] = tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = self._biases()
        return given | self.search(self.n or 1)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _biases(self) -> Mapping[int, float]:
        found = {}
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(
                    f"logit_bias has the key {key[:24]!r}; wanted token ids", param="logit_bias"
                )
            found[int(key)] = bias
        return MappingProxyType(found)

    def check_stream(self) -> None:
        """Refuse to stream what only a whole answer can carry, and options of no stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only accepted with stream: true", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs"
            )
