"""Turn a step's logits into one token a choice; knows parameters and randomness, nothing of text.

Randomness is counted, not carried: the uniform number for token ``t`` of a choice is a hash of
(seed, choice index, digest of the prompt, t). So it does not depend on what else is in the batch,
on preemption, or on torch's global state; equal prompts with equal seeds repeat, choices differ,
and different prompts under one seed are not correlated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.errors import InvalidRequest, RadixKVError
from radixkv.service.engine.drawing import argmax, draw, log_total
from radixkv.service.engine.grammar_state import GrammarState, failure, hold
from radixkv.service.engine.nucleus import Cuts
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.penalties import LogitEdits, apply_edits

if TYPE_CHECKING:
    from radixkv.service.engine.grammar_compile import Grammar


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token drawn. ``logprob`` and ``top`` are the model's own: before penalties, grammars and
    cuts."""

    token_id: int
    logprob: float | None = None
    """None unless the choice asked for log-probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, likeliest first."""
    error: str | RadixKVError | None = None
    """Why no token could be drawn; ``token_id`` then means nothing. Other rows are not affected."""
    final: bool = False
    """Whether the choice is over with it: its grammar allows nothing more."""


class Prompt:
    """What sampling needs of a prompt; n choices share one, so it is digested once."""

    __slots__ = ("_digest", "_ids", "_unique")

    def __init__(self, ids: Sequence[int] | np.ndarray) -> None:
        self._ids = np.asarray(ids, dtype=np.uint32)
        self._digest: bytes | None = None
        self._unique: np.ndarray | None = None

    @property
    def digest(self) -> bytes:
        """128 bits over the token ids."""
        if self._digest is None:
            self._digest = blake2b(self._ids.astype(">u4").tobytes(), digest_size=16).digest()
        return self._digest

    @property
    def unique(self) -> np.ndarray:
        """The distinct token ids."""
        if self._unique is None:
            self._unique = np.unique(self._ids).astype(np.int64)
        return self._unique


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest if ``params`` name a token that is not in the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias.keys()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{name} has token id {token}; the vocabulary has ids 0 to {vocab_size - 1}",
                    param=name,
                )
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias}; wanted a number", param="logit_bias"
            )


class ChoiceSampler:
    """One choice's randomness and memory of its tokens; lives as long as the choice does."""

    __slots__ = ("_key", "edits", "grammar", "params")

    def __init__(
        self,
        params: SamplingParams,
        *,
        index: int,
        prompt_ids: Sequence[int] | Prompt,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        entropy: int,
        grammar: Grammar | None = None,
    ) -> None:
        """``entropy`` takes the seed's place where there is none: give each request its own.

        ``grammar`` is what ``params.grammar`` means; each choice goes through it for itself.
        """
        check_token_ids(params, vocab_size)
        prompt = prompt_ids if isinstance(prompt_ids, Prompt) else Prompt(prompt_ids)
        self.params = params
        unique = prompt.unique if params.repetition_penalty != 1.0 else np.empty(0, np.int64)
        eos = [token for token in eos_token_ids if token < vocab_size]
        self.edits = LogitEdits(params, unique[unique < vocab_size], eos)
        self.grammar: GrammarState | None = None
        if grammar is not None:  # it knows whether an end can be put off
            self.grammar = grammar.start(
                put_off=self.edits.banned_early,
                min_tokens=params.min_tokens,
                ignore_eos=params.ignore_eos,
            )
            self.edits.banned_early = np.empty(0, np.int64)
        self._key = b""
        if not params.greedy:
            source = f"entropy {entropy}" if params.seed is None else f"seed {params.seed}"
            told = f"{source} choice {index} ".encode() + prompt.digest
            self._key = blake2b(told, digest_size=32, person=b"radixkv draws").digest()

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far."""
        return self.edits.num_tokens

    def uniform(self) -> float:
        """Return the number in [0, 1) that the next token is drawn with; the same until it is."""
        count = self.num_tokens.to_bytes(8, "little")
        bits = blake2b(count, key=self._key, digest_size=8).digest()
        return (int.from_bytes(bits, "little") >> 11) * 2.0**-53

    def record(self, token_id: int) -> bool:
        """Take note of a token drawn; returns whether the grammar lets nothing follow it."""
        self.edits.record(token_id)
        return self.grammar is not None and self.grammar.take(token_id)


@torch.inference_mode()
def sample(logits: torch.Tensor, samplers: Sequence[ChoiceSampler]) -> list[SampledToken]:
    """Draw the next token of every choice and record it there.

    logits    [R, V] fp32, one row a sampler; left unchanged
    return    one entry a row; one with ``error`` (nothing recorded) where a row has NaN or
              +inf, or where no token is left to draw, or whose grammar cannot go on

    Rows without penalties and grammars cost an argmax if greedy; the others are copied once.
    """
    assert logits.dim() == 2 and len(logits) == len(samplers), "one row of logits a choice"
    if not samplers:
        return []
    logits = logits.float()
    ids = np.zeros(len(samplers), np.int64)
    peaks = np.zeros(len(samplers), np.float32)
    edited = [s.edits.active or s.grammar is not None for s in samplers]
    plain = [r for r, s in enumerate(samplers) if s.params.greedy and not edited[r]]
    if plain:
        ids[plain], peaks[plain] = argmax(logits, plain)
    if len(plain) < len(samplers):
        skip = set(plain)
        rest = [r for r in range(len(samplers)) if r not in skip]
        held = {r: grammar for r in rest if (grammar := samplers[r].grammar) is not None}
        if held:  # first, so that they are one slice
            rest = [*held, *(r for r in rest if r not in held)]
        copy = logits[rest] if plain or held else logits.clone()
        apply_edits(copy, [(i, samplers[r].edits) for i, r in enumerate(rest) if edited[r]])
        if held:
            hold(copy[: len(held)], list(held.values()))
        ids[rest], peaks[rest] = _draw_copied(copy, [samplers[r] for r in rest])
    good = np.isfinite(peaks)
    logprobs = _logprobs(logits, ids, [(r, s) for r, s in enumerate(samplers) if good[r]])
    drawn: list[SampledToken] = []
    for row, (sampler, token) in enumerate(zip(samplers, ids.tolist(), strict=True)):
        if not good[row]:
            drawn.append(SampledToken(0, error=_complaint(float(peaks[row]))))
            continue
        taken = logprobs.get(row) or SampledToken(token)
        if sampler.grammar is None:
            sampler.record(token)
        else:
            taken = _record_held(sampler, sampler.grammar, taken)
        drawn.append(taken)
    return drawn


def _draw_copied(
    logits: torch.Tensor, samplers: Sequence[ChoiceSampler]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token and the largest logit for each row; overwrites ``logits``."""
    ids = np.zeros(len(samplers), np.int64)
    peaks = np.zeros(len(samplers), np.float32)
    greedy = [i for i, s in enumerate(samplers) if s.params.greedy]
    if greedy:
        ids[greedy], peaks[greedy] = argmax(logits, greedy)
    warm = [i for i, s in enumerate(samplers) if not s.params.greedy]
    if not warm:
        return ids, peaks
    rows = logits[warm] if greedy else logits
    tops = rows.amax(1, keepdim=True)
    peaks[warm] = tops[:, 0].cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(peaks[warm]))
    if bad.size:  # drawn like the others, from nothing in particular, and thrown away
        rows[bad] = 0.0
        tops[bad] = 0.0
    asked = [samplers[i].params for i in warm]
    cuts = Cuts(
        top_k=np.array([p.top_k for p in asked], np.int64),
        top_p=np.array([p.top_p for p in asked]),
        min_p=np.array([p.min_p for p in asked]),
    )
    temperature = np.array([p.temperature for p in asked])
    uniforms = np.array([samplers[i].uniform() for i in warm])
    ids[warm] = draw(rows, tops, temperature, cuts, uniforms)
    return ids, peaks


def _record_held(
    sampler: ChoiceSampler, grammar: GrammarState, token: SampledToken
) -> SampledToken:
    """Record a token that had to be one of a grammar's."""
    if grammar.error is None and sampler.record(token.token_id):
        return replace(token, final=True)
    if grammar.error is not None:
        return SampledToken(0, error=failure(grammar.error))
    return token


def _logprobs(
    logits: torch.Tensor, ids: np.ndarray, rows: Sequence[tuple[int, ChoiceSampler]]
) -> dict[int, SampledToken]:
    """Return the tokens of the rows whose choices ask for log-probabilities, by row."""
    wanted = [(r, k) for r, s in rows if (k := s.params.logprobs_to_find) is not None]
    if not wanted:
        return {}
    which = [r for r, _ in wanted]
    raw = logits if len(which) == len(logits) else logits[which]
    norm = log_total(raw)
    chosen = torch.from_numpy(ids[which]).to(raw.device)[:, None]
    own = (raw.gather(1, chosen) - norm)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(which)
    # By k, for the order of equal logits depends on it, and must not on what others ask for.
    for k in {k for _, k in wanted if k}:
        some = [i for i, (_, asked) in enumerate(wanted) if asked == k]
        best = raw[some].topk(min(k, raw.shape[1]), dim=1)
        values = (best.values - norm[some]).tolist()
        for i, likeliest, logprobs in zip(some, best.indices.tolist(), values, strict=True):
            tops[i] = tuple(zip(likeliest, logprobs, strict=True))
    return {row: SampledToken(int(ids[row]), own[i], tops[i]) for i, row in enumerate(which)}


def _complaint(peak: float) -> str:
    if math.isnan(peak):
        return "the model's logits have a NaN"
    if peak > 0:
        return "the model's logits have an infinity"
    return "every token is ruled out (all logits are -inf)"
