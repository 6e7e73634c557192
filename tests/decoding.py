"""Decodes greedily through a ModelRunner, sequences coming and going: a small engine without one.

Knows tables, steps and ids. Each sequence's blocks are handed out in a shuffled order; what lies in
a block before it is written is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner

BLOCK = 16


@dataclass
class Running:
    """A prompt and its answer so far."""

    ids: list[int]
    table: list[int]
    wanted: int
    starts: int
    done: int = 0
    answer: list[int] = field(default_factory=list)


def greedy(
    runner: ModelRunner, requests: Sequence[tuple[int, list[int], int]], *, shared: int = 0
) -> list[list[int]]:
    """Answer requests of (step at which it comes, prompt, tokens wanted).

    All whose turn it is run together: first their prompts, then a token a step. The first
    ``shared`` tokens, whole blocks, are common to all prompts and lie in common blocks.
    """
    num_blocks = runner.pool.num_blocks - (runner.graphs is not None)
    free = [int(b) for b in np.random.default_rng(0).permutation(num_blocks)]
    if runner.pool.scales is None:
        runner.pool.data[:, :, :num_blocks].fill_(torch.nan)
    common = [free.pop() for _ in range(shared // BLOCK)]
    all_of_them = []
    for start, prompt, wanted in requests:
        need = -(-(len(prompt) + wanted) // BLOCK) - len(common)
        own = [free.pop() for _ in range(need)]
        all_of_them.append(Running(list(prompt), common + own, wanted, start))
    if shared:
        first = all_of_them[0]
        _step(runner, [(first, shared)])
        for one in all_of_them:
            one.done = shared
    now = 0
    while left := [one for one in all_of_them if len(one.answer) < one.wanted]:
        turn = [one for one in left if one.starts <= now]
        if turn:
            _step(runner, [(one, len(one.ids) - one.done) for one in turn])
        now += 1
    return [one.answer for one in all_of_them]


def _step(runner: ModelRunner, work: list[tuple[Running, int]]) -> None:
    width = max(len(one.table) for one, _ in work)
    parts = [one.ids[one.done : one.done + n] for one, n in work]
    for one, n in work:
        one.done += n
    ends = [one.done == len(one.ids) for one, _ in work]
    rows = np.cumsum([n for _, n in work])[ends] - 1
    logits = runner.forward(
        StepBatch(
            token_ids=np.concatenate(parts).astype(np.int64),
            query_lens=np.array([n for _, n in work], np.int32),
            kv_lens=np.array([one.done for one, _ in work], np.int32),
            block_tables=np.array(
                [one.table + [0] * (width - len(one.table)) for one, _ in work], np.int32
            ),
            logit_rows=rows.astype(np.int64),
        )
    )
    assert logits.dtype == torch.float32 and torch.isfinite(logits).all()
    for one, token in zip(
        [one for (one, _), end in zip(work, ends, strict=True) if end],
        logits.argmax(-1).tolist(),
        strict=True,
    ):
        one.ids.append(token)
        one.answer.append(token)


RAGGED = ((0, 5, 30), (0, 75, 18), (2, 1, 12), (5, 40, 8), (5, 17, 14), (9, 33, 4), (20, 60, 9))
"""Seven prompts of all lengths that come and go: 1, 2, 4 and 8 rows, windows crossed."""

FEW = ((0, 13, 6), (0, 40, 3), (2, 17, 3))
"""For backends that take their time: 1, 2 and 4 rows."""


def ragged(
    seed: int = 0, shapes: Sequence[tuple[int, int, int]] = RAGGED
) -> list[tuple[int, list[int], int]]:
    """Draw prompts for (step at which it comes, tokens, tokens wanted)."""
    rng = np.random.default_rng(seed)
    return [(start, rng.integers(3, 300, n).tolist(), wanted) for start, n, wanted in shapes]


def build_runner(loaded: LoadedModel, **options: object) -> ModelRunner:
    """Make a runner with room for the requests above."""
    return ModelRunner(loaded, 96, BLOCK, **options)  # type: ignore[arg-type]
