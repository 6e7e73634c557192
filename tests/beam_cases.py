"""Beam searches by others, to compare ours with: transformers' own, and a plain one in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from radixkv.service.engine.params import Choice


class Answer(NamedTuple):
    """An answer with what ended it, and its score."""

    ids: list[int]
    score: float


def by_transformers(
    model: Any,
    ids: Sequence[int],
    *,
    width: int,
    n: int,
    max_tokens: int,
    eos: Collection[int],
    **settings: Any,
) -> list[Answer]:
    """What ``generate(num_beams=width)`` says, the best first."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=sorted(eos) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    if width == 1:  # it is greedy then, and gives no scores
        told = out.sequences[0, len(ids) :].tolist()
        each = [
            float(torch.log_softmax(logits[0].double(), -1)[token])
            for logits, token in zip(out.scores, told, strict=True)
        ]
        scores = [sum(each) / len(each) ** settings.get("length_penalty", 1.0)]
    else:
        scores = out.sequences_scores.tolist()
    found = []
    for sequence, score in zip(out.sequences, scores, strict=True):
        answer = sequence[len(ids) :].tolist()
        ends = [i for i, token in enumerate(answer) if token in eos]
        found.append(Answer(answer[: ends[0] + 1] if ends else answer, score))
    return found


def by_hand(
    logits_after: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    *,
    width: int,
    n: int,
    max_tokens: int,
    eos: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    min_tokens: int = 0,
) -> list[Answer]:
    """The same rules over a function from all tokens to logits, with nothing kept between steps."""
    keep = max(2, 1 + len(set(eos))) * width
    running: list[tuple[list[int], np.float32]] = [([], np.float32(0.0))]
    finished: list[tuple[np.float32, list[int]]] = []
    while running:
        found = []
        for ids, total in running:
            logits = torch.from_numpy(logits_after([*prompt, *ids]))
            logprobs = torch.log_softmax(logits, -1).numpy()
            for token, logprob in enumerate(logprobs):
                if len(ids) >= min_tokens or token not in eos:
                    found.append((np.float32(logprob + total), [*ids, token]))
        found.sort(key=lambda item: -item[0])
        length = len(found[0][1])
        running = []
        for place, (total, ids) in enumerate(found[:keep]):
            if ids[-1] not in eos and length < max_tokens:
                running.append((ids, total))
            elif place < width:
                finished.append((np.float32(total / np.float32(length**length_penalty)), ids))
        running = running[:width]
        finished = sorted(finished, key=lambda item: -item[0])[:width]
        if running and len(finished) == width:
            longest = early_stopping == "never" and length_penalty > 0
            divisor = np.float32((max_tokens if longest else length) ** length_penalty)
            if early_stopping is True or width == 1 or running[0][1] / divisor <= finished[-1][0]:
                break
    return [Answer(ids, float(score)) for score, ids in finished[:n]]


def shown(answers: Sequence[Answer], eos: Collection[int]) -> list[list[int]]:
    """The ids that we list: without what ended them."""
    return [a.ids[:-1] if a.ids and a.ids[-1] in eos else a.ids for a in answers]


def assert_same(
    choices: Sequence[Choice],
    answers: Sequence[Answer],
    eos: Collection[int],
    length_penalty: float = 1.0,
    rounding: float = 3e-5,
) -> None:
    """Ids equal, and scores up to the ``rounding`` of a token's log-probability.

    torch's float32 log_softmax of 49,152 logits is off by 2e-5, always to the same side, and ours
    is not.
    """
    assert [list(choice.token_ids) for choice in choices] == shown(answers, eos)
    for choice, answer in zip(choices, answers, strict=True):
        length = len(answer.ids)
        assert choice.score is not None and choice.cumulative_logprob is not None
        assert abs(choice.score - answer.score) <= rounding * length / length**length_penalty
        assert choice.score == pytest.approx(
            choice.cumulative_logprob / length**length_penalty, rel=1e-5
        )
