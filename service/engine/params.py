"""What a caller may ask of generation, and what comes back; knows nothing of HTTP or tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

from radixkv.errors import InvalidRequest
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.grammar import GrammarSpec, take_grammar
from radixkv.service.engine.keep import Kept

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROBS = 20
MAX_CHOICES = 128
_WHOLE = ("min_tokens", "top_k", "n")
_WHOLE_OR_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens from logits and when to stop. Raises InvalidRequest naming the field."""

    max_tokens: int | None = None
    """Tokens to generate a choice; None is as many as the context and the pool allow."""
    min_tokens: int = 0
    """Before this many tokens neither eos, stop tokens nor stop strings end a choice."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated (OpenAI's definition)."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """transformers' definition, over prompt and output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    """Choice ``i`` draws from a generator derived from (seed, i)."""
    stop: tuple[str, ...] = ()
    """Strings that end a choice; they are never part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities. k: those of the chosen token and of the k likeliest."""
    prompt_logprobs: int | None = None
    """The same for every prompt token; such a request reads nothing from the cache."""
    n: int = 1
    """Choices; they share the prompt's blocks."""
    grammar: GrammarSpec | None = None
    """What the text of every choice must look like (grammar.py)."""
    beams: BeamParams | None = None
    """Search for the likeliest answers instead of drawing; ``n`` of them are returned."""
    best_of: int | None = None
    """Draw that many choices and return the ``n`` likeliest, by log-probability a token."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}; wanted {wanted}", param=name
                )

        for name in _WHOLE:
            need(_is_whole(getattr(self, name)), name, "a whole number")
        for name in _WHOLE_OR_NONE:
            value = getattr(self, name)
            need(value is None or _is_whole(value), name, "a whole number or None")
        for name in _NUMBERS:
            value = getattr(self, name)
            need(isinstance(value, int | float | Real), name, "a number")
        need(isinstance(self.logit_bias, Mapping), "logit_bias", "a mapping of ids to numbers")
        need(not isinstance(self.stop, str) and _all_are(str, self.stop), "stop", "strings")
        need(_all_are(int | Integral, self.stop_token_ids), "stop_token_ids", "token ids")
        need(isinstance(self.beams, BeamParams | None), "beams", "BeamParams(width=...)")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more")
        need(self.min_tokens >= 0, "min_tokens", "0 or more")
        if self.max_tokens is not None:
            need(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        need(0.0 <= self.temperature <= 2.0, "temperature", "0 to 2")
        need(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        need(0 <= self.top_k < 2**31, "top_k", "0 (off) to 2147483647")
        need(0.0 <= self.min_p <= 1.0, "min_p", "0 to 1")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "-2 to 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "-2 to 2")
        # Less would carry logits, which are divided by it, out of float32.
        need(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty", "0.01 to 10")
        need(1 <= self.n <= MAX_CHOICES, "n", f"1 to {MAX_CHOICES}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= MAX_LOGPROBS, name, f"0 to {MAX_LOGPROBS}")
        need(all(self.stop), "stop", "strings that are not empty")
        need(isinstance(self.grammar, GrammarSpec | None), "grammar", "a GrammarSpec")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit whole number")
        most = self.best_of
        need(most is None or self.n <= most <= MAX_CHOICES, "best_of", f"n to {MAX_CHOICES}")
        if self.beams is not None:
            self.beams.check(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for it: choices, or the beams of a search."""
        return (self.best_of or self.n) if self.beams is None else self.beams.width

    @property
    def selects(self) -> bool:
        """Whether choices are drawn that may not be returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def logprobs_to_find(self) -> int | None:
        """``logprobs``, or 0 where choices are selected by those of their own tokens."""
        return 0 if self.logprobs is None and self.selects else self.logprobs

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token and of its likeliest rivals, before penalties and cuts."""

    token_id: int
    token: str
    """The token's text; bytes that are no whole character show as U+FFFD."""
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """(token id, token, bytes, logprob), likeliest first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one choice. ``text`` is whole characters, free of stop strings."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, if one did."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. ``cached_tokens`` is what the cache gave at first admission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    given_up_tokens: int = 0
    """Of what the cache had, tokens that were computed again to keep answers deterministic. The
    compiled decoder never needs that: its sums are the same wherever a hit ends."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    """Of a beam, or one of ``best_of``: the sum over its tokens, one that ended it included."""
    score: float | None = None
    """That sum over the number of tokens, which for a beam is to the power of its penalty."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``Engine.generate`` and ``Engine.chat``; the short names read choice 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry a prompt token; the first is None, since nothing precedes it."""
    deterministic: bool = False
    """Whether the engine promised that these bits depend on the request and the weights alone."""
    kept: tuple[Kept, ...] = ()
    """What became of the prefixes that were to stay resident, the shortest first."""

    @property
    def given_up_tokens(self) -> int:
        """Cached tokens that were computed again to keep that promise."""
        return self.usage.given_up_tokens

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of choice 0, without what ended it."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason


def _is_whole(value: object) -> bool:
    return isinstance(value, int | Integral) and not isinstance(value, bool)


def _all_are(kind: Any, values: object) -> bool:
    return isinstance(values, Collection) and all(isinstance(v, kind) for v in values)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from keywords: ``stop`` may be one string, lists may stand for tuples, and the
    kinds of a GrammarSpec (``json_schema=``, ``regex=``...) are keywords.

    Raises InvalidRequest naming a field that does not exist.
    """
    known = SamplingParams.__dataclass_fields__
    values = dict(fields)
    grammar = take_grammar(values)
    if grammar is not None:
        values["grammar"] = grammar
    for name in values:
        if name not in known:
            raise InvalidRequest(
                f"{name} is no sampling parameter; known: {', '.join(known)}", param=name
            )
    stop = values.get("stop")
    if isinstance(stop, str):
        values["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if values.get(name) is None:
            values.pop(name, None)
        elif isinstance(values[name], Iterable):
            values[name] = tuple(values[name])
    return SamplingParams(**values)
