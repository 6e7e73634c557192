"""Bias, penalties and masks change the logits as OpenAI and transformers define them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from radixkv.errors import InvalidRequest
from radixkv.service.engine.sampling import ChoiceSampler, sample
from tests.sampling_cases import VOCAB, random_logits, sampler


def greedy_argmax_of(expected: torch.Tensor, one: ChoiceSampler, logits: torch.Tensor) -> None:
    assert sample(logits[None], [one])[0].token_id == int(expected.argmax())


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    """OpenAI: logit - count * frequency - (count > 0) * presence, the prompt not counted."""
    one = sampler(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.zeros(VOCAB)
    logits[5], logits[40], logits[41] = 1.0, 1.9, 1.2  # 5 is in the prompt
    drawn = [sample(logits[None], [one])[0].token_id for _ in range(5)]
    # 40: 1.9, 1.15, 0.9 ...; 41: 1.2, 0.45; 5: 1.0
    assert drawn == [40, 41, 40, 5, 40]


@settings(max_examples=30, deadline=None)
@given(
    penalty=st.sampled_from([0.5, 1.1, 3.0]),
    bias=st.dictionaries(st.integers(0, 19), st.floats(-5, 5), max_size=4),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_repetition_penalty_and_bias_are_those_of_transformers_over_a_whole_answer(
    penalty: float, bias: dict[int, float], prompt: list[int], seed: int
) -> None:
    params: dict[str, Any] = {"repetition_penalty": penalty, "logit_bias": bias}
    one = sampler(prompt=prompt, vocab_size=20, temperature=0.0, **params)
    steps: Any = LogitsProcessorList()
    if bias:
        steps.append(SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()]))
    steps.append(RepetitionPenaltyLogitsProcessor(penalty))
    context = list(prompt)
    for row in random_logits(12, 20, seed=seed):
        expected = steps(torch.tensor([context]), row[None].clone())[0]
        greedy_argmax_of(expected, one, row)
        context.append(int(expected.argmax()))


def test_a_bias_of_a_hundred_forces_or_bans_a_token() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}]
    for params in ways:
        forced = sampler(logit_bias={17: 100.0}, **params)
        banned = sampler(logit_bias={best: -100.0}, **params)
        assert sample(logits, [forced])[0].token_id == 17
        assert sample(logits, [banned])[0].token_id != best


def test_eos_and_stop_tokens_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 9], logits[0, 30] = 5.0, 4.0, 1.0
    one = sampler(temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    assert [sample(logits, [one])[0].token_id for _ in range(3)] == [30, 30, 2]
    warm = sampler(seed=0, min_tokens=2, stop_token_ids=(9,), top_k=1)
    assert [sample(logits, [warm])[0].token_id for _ in range(3)] == [30, 30, 2]


def test_eos_ids_and_prompt_ids_beyond_the_vocabulary_change_nothing() -> None:
    params: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 2.0, "min_tokens": 1}
    one = sampler(prompt=[1, 2, 50], vocab_size=2, **params)
    assert sample(torch.tensor([[1.0, 1.5]]), [one])[0].token_id == 0


def test_with_ignore_eos_eos_is_an_ordinary_token_from_the_start() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 5.0
    one = sampler(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(logits, [one])[0].token_id == 2


@pytest.mark.parametrize(
    ("params", "name", "told"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", str(VOCAB)),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
        ({"logit_bias": {3: math.nan}}, "logit_bias", "nan"),
        ({"stop_token_ids": (7, 99999)}, "stop_token_ids", "99999"),
    ],
)
def test_a_token_that_does_not_exist_is_refused_by_name(
    params: dict[str, Any], name: str, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        sampler(**params)
    assert refused.value.param == name
