"""Drawing tokens: distributions equal to transformers', randomness that is each choice's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.errors import InvalidRequest
from radixkv.service.engine.drawing import draw, draw_whole
from radixkv.service.engine.nucleus import Cuts, draw_bucketed, draw_sorted
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.sampling import ChoiceSampler, Prompt, SampledToken, sample

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


def cuts(rows: int, top_k: int, top_p: float, min_p: float) -> Cuts:
    return Cuts(np.full(rows, top_k), np.full(rows, top_p), np.full(rows, min_p))


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


def assert_draws_follow(draw_rows: Any, scores: torch.Tensor, wanted: np.ndarray) -> None:
    """Every token kept must own its stretch of [0, 1), to 1e-5, and no other token any."""
    ranking = np.argsort(-scores.numpy(), kind="stable")
    wanted = np.sort(wanted)[::-1]  # of equal tokens transformers keeps any, we the lowest ids
    num_kept = np.count_nonzero(wanted)
    upto = wanted[:num_kept].cumsum()
    before = np.concatenate([[0.0], upto[:-1]])
    wide = upto - before > 3e-5
    uniforms = np.concatenate([before[wide] + 1e-5, upto[wide] - 1e-5])
    ids = draw_rows(scores[None].repeat(len(uniforms), 1), uniforms)
    assert ids.tolist() == np.tile(ranking[:num_kept][wide], 2).tolist()
    assert draw_rows(scores[None], np.array([0.0])).tolist() == [ranking[0]]
    last = draw_rows(scores[None], np.array([1 - 2**-53])).tolist()
    assert last[0] in ranking[:num_kept]


@pytest.mark.parametrize("implementation", [draw_sorted, draw_bucketed])
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    ties=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 7, 50, VOCAB, 2 * VOCAB]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
)
def test_cuts_keep_what_transformers_keeps_with_its_probabilities(
    implementation: Any,
    seed: int,
    scale: float,
    ties: bool,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    scores = random_logits(1, seed=seed, scale=scale)[0]
    if ties:
        scores = (scores * 4).round() / 4
    scores = scores - scores.max()
    before_p = np.sort(theirs(scores, SamplingParams(top_k=top_k)))[::-1]
    if top_p < 1.0:  # which side of a cut a token is on must not hang on the last bit
        assume(np.abs(before_p.cumsum() - top_p).min() > 1e-7)
    if 0.0 < min_p < 1.0:
        assume(np.abs(before_p / before_p[0] - min_p).min() > 1e-7)
    wanted = theirs(scores, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    assert_draws_follow(
        lambda rows, u: implementation(rows, cuts(len(u), top_k, top_p, min_p), u), scores, wanted
    )


def test_both_ways_to_cut_agree_on_a_large_vocabulary() -> None:
    rng = np.random.default_rng(0)
    rows = 48
    for scale in (1.0, 4.0):
        scores = random_logits(rows, 20_000, seed=1, scale=scale)
        scores -= scores.amax(1, keepdim=True)
        asked = Cuts(
            rng.choice([0, 3, 40, 5000], rows),
            rng.choice([1.0, 0.95, 0.5], rows),
            rng.choice([0.0, 0.02], rows),
        )
        uniforms = rng.random(rows)
        same = draw_sorted(scores, asked, uniforms) == draw_bucketed(scores, asked, uniforms)
        assert same.all()


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_without_cuts_every_token_owns_its_stretch_in_vocabulary_order(vocab: int) -> None:
    scores = random_logits(1, vocab, seed=vocab, scale=1.0)[0]
    scores[1] = -math.inf
    upto = torch.softmax(scores.double(), 0).cumsum(0).numpy()
    before = np.concatenate([[0.0], upto[:-1]])
    wide = np.flatnonzero(upto - before > 3e-5)
    uniforms = np.concatenate([before[wide] + 1e-5, upto[wide] - 1e-5, [1 - 2**-53]])
    rows = (scores - scores.max())[None].repeat(len(uniforms), 1)
    ids = draw_whole(rows, uniforms).tolist()
    assert ids[:-1] == np.tile(wide, 2).tolist()
    assert ids[-1] != 1 and 0 <= ids[-1] < vocab


def test_rows_of_one_batch_get_each_their_own_temperature_and_cuts() -> None:
    logits = random_logits(4, seed=3)
    uniforms = np.array([0.1, 0.9, 0.5, 0.7])
    warmth = np.array([0.3, 1.0, 1.7, 1.0])
    asked = Cuts(np.array([0, 5, 0, 0]), np.array([1.0, 1.0, 0.8, 1.0]), np.zeros(4))
    peaks = logits.amax(1, keepdim=True)
    together = draw(logits.clone(), peaks, warmth, asked, uniforms)
    for r in range(4):
        one = np.array([r])
        alone = draw(logits[one].clone(), peaks[one], warmth[one], asked.take(one), uniforms[one])
        assert alone[0] == together[r]


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


# ---- penalties, bias, masks ---------------------------------------------------------------------


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
