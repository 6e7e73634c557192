"""Draws follow exactly the distributions that transformers' cuts leave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixkv.service.engine.drawing import draw, draw_whole
from radixkv.service.engine.nucleus import Cuts, draw_bucketed, draw_sorted
from radixkv.service.engine.params import SamplingParams
from tests.sampling_cases import VOCAB, random_logits, theirs


def cuts(rows: int, top_k: int, top_p: float, min_p: float) -> Cuts:
    return Cuts(np.full(rows, top_k), np.full(rows, top_p), np.full(rows, min_p))


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
