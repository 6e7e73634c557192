"""Beam search by itself: candidates from logits, and which beams go on, end and are returned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidRequest
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.beams_search import BeamSearch, Candidates, Trail, find_candidates
from tests.beam_cases import by_hand
from tests.fake_model import VOCAB, logits_after


def candidates(total: float, *pairs: tuple[int, float]) -> Candidates:
    """Of a beam with this total: (token, log-probability), the best first."""
    logprobs = np.array([logprob for _, logprob in pairs], np.float32)
    ids = np.array([token for token, _ in pairs], np.int64)
    return Candidates(ids, logprobs, (logprobs + np.float32(total)).astype(np.float32))


def ids(trail: Trail | None) -> list[int]:
    return [] if trail is None else [token.token_id for token in trail.tokens()]


def test_candidates_are_the_best_continuations_of_each_row() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0]])
    first, second = find_candidates(logits, [np.float32(-1.0), np.float32(-2.0)], 2)
    assert isinstance(first, Candidates) and isinstance(second, Candidates)
    assert first.ids.tolist() == [1, 2] and second.ids.tolist() == [2, 3]
    exact = torch.log_softmax(logits.double(), 1).tolist()
    assert first.logprobs == pytest.approx([exact[0][1], exact[0][2]], abs=1e-6)
    assert second.totals == pytest.approx([exact[1][2] - 2, exact[1][3] - 2], abs=1e-6)


def test_a_row_s_candidates_are_the_same_alone_and_in_company() -> None:
    """DETERM-4: bits and all."""
    logits = torch.randn(5, 4099, generator=torch.Generator().manual_seed(1)) * 9
    totals = [np.float32(-i) for i in range(5)]
    together = find_candidates(logits, totals, 8)
    for row in range(5):
        (alone,) = find_candidates(logits[row : row + 1], totals[row : row + 1], 8)
        among = together[row]
        assert isinstance(alone, Candidates) and isinstance(among, Candidates)
        assert alone.ids.tolist() == among.ids.tolist()
        assert alone.totals.tobytes() == among.totals.tobytes()


def test_what_may_not_come_yet_is_no_candidate_and_still_a_rival() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    (found,) = find_candidates(logits, [np.float32(0)], 2, banned=[0], num_top=2)
    assert isinstance(found, Candidates)
    assert found.ids.tolist() == [2, 1]
    assert [token for token, _ in found.top] == [0, 2]
    assert found.logprobs[0] == pytest.approx(found.top[1][1])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_no_distribution_is_told_of_and_the_others_are_not_touched(
    wrong: float,
) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = wrong
    bad, good = find_candidates(logits, [np.float32(0)] * 2, 3)
    assert isinstance(bad, str) and str(wrong) in bad
    assert isinstance(good, Candidates)


def test_of_equal_sums_the_better_beam_s_goes_on_first() -> None:
    search = BeamSearch(BeamParams(2), max_tokens=9, ending=())
    search.advance([candidates(0, (5, -1), (6, -2), (7, -3), (8, -4))])
    step = search.advance(
        [
            candidates(-1, (1, -2), (2, -3), (3, -4), (4, -5)),
            candidates(-2, (1, -1), (2, -2), (3, -4), (4, -5)),
        ]
    )
    assert step.parents == (0, 1)
    assert [ids(beam.trail) for beam in search.running] == [[5, 1], [6, 1]]


def test_an_end_among_the_backups_is_passed_over() -> None:
    """Of the best ``width`` candidates those that end are answers; one further down is not, though
    one that goes on there fills the place."""
    search = BeamSearch(BeamParams(2, early_stopping=True), max_tokens=9, ending={9})
    step = search.advance([candidates(0, (9, -1), (5, -2), (6, -3), (9, -4))])
    assert [ids(answer.trail) for _, answer in step.ended] == [[9]]
    assert [ids(beam.trail) for beam in search.running] == [[5], [6]]
    step = search.advance(
        [
            candidates(-2, (1, -1), (2, -2), (9, -2.5), (4, -5)),
            candidates(-3, (1, -1), (2, -2), (3, -4), (4, -5)),
        ]
    )
    assert not step.ended and not search.done


@pytest.mark.parametrize(
    ("early", "penalty", "done"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", -1.0, True)],
)
def test_when_it_is_enough_depends_on_what_could_still_come(
    early: object, penalty: float, done: bool
) -> None:
    """Two answers are there at 2 tokens, and what runs is worse now; at 9 tokens it may not be."""
    params = BeamParams(2, penalty, early)  # type: ignore[arg-type]
    search = BeamSearch(params, max_tokens=9, ending={9})
    search.advance([candidates(0, (5, -1), (6, -1.5), (9, -8), (4, -9))])
    search.advance(
        [
            candidates(-1, (9, -0.1), (2, -2), (3, -3), (4, -5)),
            candidates(-1.5, (9, -0.1), (2, -2), (3, -4), (4, -5)),
        ]
    )
    assert search.done is done
    if done:
        assert [ids(answer.trail) for answer in search.best(2)] == [[5, 9], [6, 9]]


def test_a_better_answer_takes_the_place_of_a_worse() -> None:
    search = BeamSearch(BeamParams(1, 0.0), max_tokens=3, ending=())
    search.advance([candidates(0, (5, -1), (6, -2))])
    search.advance([candidates(-1, (5, -1), (6, -2))])
    step = search.advance([candidates(-2, (7, -0.5), (6, -2))])
    assert search.done and step.parents == ()
    (best,) = search.best(1)
    assert ids(best.trail) == [5, 5, 7] and best.score == best.total == np.float32(-2.5)


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 12),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early=st.sampled_from([True, False, "never"]),
    ending=st.sets(st.integers(0, VOCAB - 1), max_size=20),
)
def test_any_search_is_the_one_by_hand(
    prompt: list[int],
    width: int,
    max_tokens: int,
    penalty: float,
    early: object,
    ending: set[int],
) -> None:
    params = BeamParams(width, penalty, early)  # type: ignore[arg-type]
    search = BeamSearch(params, max_tokens=max_tokens, ending=ending)
    while not search.done:
        rows = [logits_after([*prompt, *ids(beam.trail)]) for beam in search.running]
        found = find_candidates(
            torch.from_numpy(np.stack(rows)),
            [beam.total for beam in search.running],
            min(search.num_candidates, VOCAB),
        )
        search.advance([c for c in found if isinstance(c, Candidates)])
    wanted = by_hand(
        lambda tokens: logits_after(tokens),
        prompt,
        width=width,
        n=width,
        max_tokens=max_tokens,
        eos=ending,
        length_penalty=penalty,
        early_stopping=early,  # type: ignore[arg-type]
    )
    best = search.best(width)
    assert [ids(answer.trail) for answer in best] == [answer.ids for answer in wanted]
    assert [float(a.score) for a in best] == pytest.approx([a.score for a in wanted], rel=1e-5)


def test_a_width_is_a_number_and_a_penalty_is_bounded() -> None:
    for wrong in (0, -1, 129, True, 2.0):
        with pytest.raises(InvalidRequest, match="beam_width"):
            BeamParams(wrong)  # type: ignore[arg-type]
    for penalty in (-5.1, 5.1, float("nan")):
        with pytest.raises(InvalidRequest, match="length_penalty"):
            BeamParams(2, penalty)
