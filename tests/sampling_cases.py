"""Samplers, random logits, and transformers' idea of a distribution, for the tests of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.sampling import ChoiceSampler, Prompt

VOCAB = 100
EOS = (2,)
PROMPT = (5, 6, 7, 6)


def sampler(
    *,
    index: int = 0,
    prompt: Sequence[int] | Prompt = PROMPT,
    vocab_size: int = VOCAB,
    entropy: int = 0,
    **params: Any,
) -> ChoiceSampler:
    return ChoiceSampler(
        SamplingParams(**params),
        index=index,
        prompt_ids=prompt,
        vocab_size=vocab_size,
        eos_token_ids=EOS,
        entropy=entropy,
    )


def random_logits(
    rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return made * scale


def theirs(logits: torch.Tensor, params: SamplingParams, context: Sequence[int] = PROMPT) -> Any:
    """transformers' probabilities for one row, computed in float64."""
    steps: Any = LogitsProcessorList()  # in the order of its own generate()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[i], b] for i, b in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    scores = steps(torch.tensor([list(context)]), logits.double()[None])
    return torch.softmax(scores[0], 0).numpy()
