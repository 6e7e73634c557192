"""One token a choice: distributions, randomness that is each choice's own, failures, logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.sampling import ChoiceSampler, Prompt, SampledToken, sample
from tests.sampling_cases import PROMPT, VOCAB, random_logits, sampler, theirs


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.03},
        {"repetition_penalty": 1.4, "top_p": 0.95},
        {"logit_bias": {3: 1.5, 6: -2.0}, "repetition_penalty": 0.8},
    ],
)
def test_draws_are_distributed_as_transformers_has_it(params: dict[str, Any]) -> None:
    """A chi-square test over 6,000 choices of one request, at a level of one in a million."""
    vocab, draws = 12, 6000
    row = random_logits(1, vocab, seed=8, scale=1.5)
    prompt = Prompt(PROMPT)
    many = [
        sampler(index=i, prompt=prompt, vocab_size=vocab, seed=1, **params) for i in range(draws)
    ]
    drawn = [t.token_id for t in sample(row.repeat(draws, 1), many)]
    wanted = theirs(row[0], SamplingParams(**params)) * draws
    seen = np.bincount(drawn, minlength=vocab)
    assert not seen[wanted == 0].any()
    kept = wanted > 0
    chi_square = float(((seen - wanted)[kept] ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 7 * math.sqrt(2 * freedom)


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = random_logits(3)
    logits[1, [9, 4]] = 50.0
    assert [t.token_id for t in sample(logits, [sampler(temperature=0.0)] * 3)] == [
        int(logits[0].argmax()),
        4,
        int(logits[2].argmax()),
    ]
    mixed = [sampler(temperature=0.0), sampler(seed=1), sampler(temperature=0.0, top_p=0.5)]
    drawn = sample(logits, mixed)
    assert drawn[0].token_id == int(logits[0].argmax())
    assert drawn[2].token_id == int(logits[2].argmax())


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    logits = random_logits(2)
    colds: list[dict[str, Any]] = [{"temperature": 1e-300}, {"temperature": 1e-30, "top_p": 0.9}]
    for params in colds:
        cold = [sampler(seed=i, **params) for i in range(2)]
        assert [t.token_id for t in sample(logits, cold)] == logits.argmax(1).tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(3)
    before = logits.clone()
    edited: dict[str, Any] = {"presence_penalty": 1.0, "logit_bias": {1: 5.0}, "min_tokens": 2}
    sample(logits, [sampler(**edited), sampler(temperature=0.0, **edited), sampler()])
    assert torch.equal(logits, before)


# ---- randomness ---------------------------------------------------------------------------------


def answer(one: ChoiceSampler, logits: torch.Tensor) -> list[int]:
    return [sample(row[None], [one])[0].token_id for row in logits]


def test_choices_of_one_seed_differ_and_each_repeats() -> None:
    """COW-2: n=3, seed=7, temperature=1 gives three different choices, the same every time."""
    logits = random_logits(12)
    first = [answer(sampler(index=i, seed=7), logits) for i in range(3)]
    again = [answer(sampler(index=i, seed=7), logits) for i in range(3)]
    assert first == again
    assert len({tuple(a) for a in first}) == 3


def test_one_seed_over_many_prompts_draws_no_common_noise() -> None:
    """COW-4: 50 prompts, one seed; the same prompt and seed still repeat."""
    prompts = [[5, 6, i] for i in range(50)]
    first = [sampler(prompt=p, seed=3).uniform() for p in prompts]
    assert first == [sampler(prompt=p, seed=3).uniform() for p in prompts]
    assert len(set(first)) == 50
    assert 0.3 < np.mean(first) < 0.7 and np.std(first) > 0.2
    logits = random_logits(1, scale=1.0).repeat(50, 1)
    drawn = {t.token_id for t in sample(logits, [sampler(prompt=p, seed=3) for p in prompts])}
    assert len(drawn) > 20


def test_numbers_of_neighbouring_choices_and_tokens_are_not_correlated() -> None:
    rows = []
    for i in range(40):
        one, numbers = sampler(index=i, seed=0), []
        for token in range(40):
            numbers.append(one.uniform())
            one.record(token)
        rows.append(numbers)
    table = np.array(rows)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.1
    counts = np.histogram(table, bins=16, range=(0, 1))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 45  # 15 degrees of freedom, one in ten thousand


def test_without_a_seed_the_requests_entropy_decides() -> None:
    logits = random_logits(12)
    assert answer(sampler(entropy=1), logits) == answer(sampler(entropy=1), logits)
    assert answer(sampler(entropy=1), logits) != answer(sampler(entropy=2), logits)
    assert answer(sampler(seed=1, entropy=1), logits) == answer(sampler(seed=1, entropy=2), logits)
    assert sampler(seed=-1).uniform() != sampler(seed=2**64 - 1).uniform()
    assert sampler(seed=5).uniform() != sampler(entropy=5).uniform()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20, "presence_penalty": 1.0}])
def test_a_choice_does_not_depend_on_its_batch_or_on_global_state(params: dict[str, Any]) -> None:
    logits = random_logits(10)
    alone = answer(sampler(seed=4, **params), logits)
    one, others = sampler(seed=4, **params), [sampler(seed=i, top_p=0.7) for i in range(5)]
    greedy = sampler(temperature=0.0)
    together = []
    for step, row in enumerate(logits):
        torch.manual_seed(step)
        noise = random_logits(6, seed=step + 50)
        batch = torch.cat([noise[: step % 3], row[None], noise[step % 3 :]])
        company = [*others[: step % 3], one, *others[step % 3 :], greedy]
        together.append(sample(batch, company)[step % 3].token_id)
    assert together == alone


def test_a_failed_step_can_be_drawn_again() -> None:
    """Randomness is counted by recorded tokens, so a recomputed step draws the same token."""
    logits = random_logits(3)
    one = sampler(seed=4)
    sample(logits[:1], [one])
    expected = one.uniform()
    assert sample(torch.full((1, VOCAB), math.nan), [one])[0].error
    assert one.uniform() == expected and one.num_tokens == 1


# ---- failures and log-probabilities -------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}])
@pytest.mark.parametrize(
    ("value", "told"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "ruled out")]
)
def test_a_row_that_cannot_be_drawn_fails_alone(
    params: dict[str, Any], value: float, told: str
) -> None:
    logits = random_logits(3)
    expected = [t.token_id for t in sample(logits, [sampler(**params) for _ in range(3)])]
    if value == -math.inf:
        logits[1] = value
    else:
        logits[1, 7] = value
    batch = [sampler(logprobs=1, **params) for _ in range(3)]
    drawn = sample(logits, batch)
    assert told in str(drawn[1].error)
    assert [drawn[0].token_id, drawn[2].token_id] == [expected[0], expected[2]]
    assert [t.error for t in drawn[::2]] == [None, None]
    assert [s.num_tokens for s in batch] == [1, 0, 1]


def test_logprobs_are_the_models_own_whatever_is_done_to_the_logits() -> None:
    logits = random_logits(3)
    changed: dict[str, Any] = {"logit_bias": {9: 50.0}, "temperature": 0.5, "top_k": 1}
    drawn = sample(
        logits,
        [
            sampler(logprobs=3, **changed),
            sampler(logprobs=0, temperature=0.0),
            sampler(temperature=0.0),
        ],
    )
    own = torch.log_softmax(logits, 1)
    best = own[0].topk(3)
    assert drawn[0].token_id == 9
    assert drawn[0].logprob == pytest.approx(float(own[0, 9]), abs=1e-5)
    assert [i for i, _ in drawn[0].top] == best.indices.tolist()
    assert [v for _, v in drawn[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert drawn[1].logprob == pytest.approx(float(own[1].max()), abs=1e-5)
    assert drawn[1].top == ()
    assert drawn[2] == SampledToken(int(logits[2].argmax()))


def test_more_logprobs_than_tokens_gives_them_all() -> None:
    drawn = sample(torch.zeros(1, 3), [sampler(vocab_size=3, temperature=0.0, logprobs=20)])
    assert len(drawn[0].top) == 3


def test_no_rows_is_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
