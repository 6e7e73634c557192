"""What the bench of sharing counts is what an engine holds, and what can be said in advance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples.bench.bench_sharing import (
    BLOCK_SIZE,
    PUBLISHED,
    WIDTHS,
    Ancestry,
    Parents,
    measure,
    reordered_tokens,
    sample,
    search,
    stretched,
)
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.beams_search import BeamSearch
from tests.fake_model import Rig


@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("n", [2, 4])
def test_samples_share_the_whole_blocks_of_the_prompt(prompt_tokens: int, n: int) -> None:
    """Saved at each step are (n - 1) * floor(prompt / B) blocks, and n - 1 tails are copied."""
    group = sample(prompt_tokens, 11, n)
    assert group.unshared - group.held == 10 * (n - 1) * (prompt_tokens // BLOCK_SIZE)
    assert group.copies == (n - 1 if prompt_tokens % BLOCK_SIZE else 0)


def test_beams_that_all_come_from_one_share_all_but_a_tail_each() -> None:
    path: list[Parents] = [(0, 0, 0)] * 40
    group = search(20, path)
    for table in group.tables:
        assert len(table.blocks) == 4
    assert len({block for table in group.tables for block in table.blocks[:3].tolist()}) == 3


@pytest.mark.parametrize("prompt_tokens", [7, 16, 30])
def test_a_replayed_search_holds_and_copies_what_the_engine_does(
    prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, rig = BeamSearch.advance, Rig(block_size=BLOCK_SIZE)
    path: list[Parents] = []

    def logged(self: BeamSearch, found: Any) -> Any:
        step = advance(self, found)
        if step.parents:
            path.append(step.parents)
        return step

    monkeypatch.setattr(BeamSearch, "advance", logged)
    stream = rig.submit([5] * prompt_tokens, 50, beams=BeamParams(4))
    rig.turn()
    held = unshared = 0
    while not rig.core.scheduler.idle:
        # The tables as they are after the step's reservations, before its forks.
        schedule = rig.core.scheduler.schedule
        seen: list[list[int]] = []

        def watched(schedule: Any = schedule, seen: Any = seen) -> Any:
            works = schedule()
            seen.extend(work.table.blocks.tolist() for work in works)
            return works

        monkeypatch.setattr(rig.core.scheduler, "schedule", watched)
        rig.turn()
        monkeypatch.setattr(rig.core.scheduler, "schedule", schedule)
        unshared += sum(map(len, seen))
        held += len({block for blocks in seen for block in blocks})
    group = search(prompt_tokens, path)
    assert stream.beams is not None
    assert (group.held, group.unshared) == (held, unshared)
    assert group.copies == stream.beams.copied_blocks > 0


def test_a_longer_search_goes_on_like_others_and_begins_once() -> None:
    searches: list[list[Parents]] = [[(0, 0), (1, 0), (0, 1)], [(0, 0), (0, 0)]]
    path = stretched(searches, 12, np.random.default_rng(1))
    assert len(path) == 12 and path[0] == (0, 0)
    assert (1, 0) in path[1:]


def test_rows_in_order_are_copied_only_if_they_change() -> None:
    assert reordered_tokens(10, [(0, 0), (0, 1), (1, 0)]) == 2 * 10 + 0 + 2 * 12


def test_every_figure_is_measured_beside_the_published_one() -> None:
    ancestry: Ancestry = {
        width: [[(0,) * width, *[tuple(range(width))[::-1]] * 5, (0,) * width]] for width in WIDTHS
    }
    found = measure(ancestry, 4)
    assert {(name, way) for name, ways in found.items() for way in ways} == set(PUBLISHED)
    for ways in found.values():
        for values in ways.values():
            assert len(values) == len(WIDTHS) and values == sorted(values)
            assert all(0 <= value < 100 for value in values)
