"""The runs that sequences of a step share, against a dull trie that counts unit by unit."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel, SharedRuns, shared_runs

FREE = CostModel(token=1.0)


def make_plan(
    tables: list[list[int]], query_lens: list[int], kv_lens: list[int], block_size: int
) -> AttentionPlan:
    """Build a plan; short tables are padded with ids that would show sharing if they were read."""
    width = max(map(len, tables), default=0) + 2
    padded = [row + [7] * (width - len(row)) for row in tables]
    return AttentionPlan.build(query_lens, kv_lens, padded, block_size)


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    """Sequences that branch off each other at random blocks, some of them idle or prefilling."""
    block_size = draw(st.sampled_from((1, 2, 3, 4)))
    num_seqs = draw(st.integers(0, 9))
    fresh = iter(range(1000))
    tables: list[list[int]] = []
    queries, lengths = [], []
    for s in range(num_seqs):
        count = draw(st.integers(1, 14))
        if s and draw(st.integers(0, 3)):
            parent = tables[draw(st.integers(0, s - 1))]
            row = parent[: min(count, draw(st.integers(0, len(parent))))]
        else:
            row = []
        row = row + [next(fresh) for _ in range(count - len(row))]
        length = draw(st.integers((count - 1) * block_size + 1, count * block_size))
        tables.append(row)
        lengths.append(length)
        queries.append(draw(st.sampled_from((0, 1, 1, 1, 2, 5, length))) if length > 5 else 1)
    return make_plan(tables, queries, lengths, block_size)


def sharers_of_units(plan: AttentionPlan, granularity: int) -> dict[tuple[int, ...], set[int]]:
    """Which sequences read one unit of keys: by its end and the ids of all blocks up to it."""
    sharers = defaultdict(set)
    for s in range(plan.num_seqs):
        cached = int(plan.host_kv_lens[s] - plan.host_query_lens[s])
        if not plan.host_query_lens[s]:
            continue
        for stop in range(granularity, cached + 1, granularity):
            blocks = -(-stop // plan.block_size)
            sharers[stop, *plan.host_block_tables[s, :blocks].tolist()].add(s)
    return sharers


def check(plan: AttentionPlan, runs: SharedRuns, granularity: int) -> None:
    """What every consumer of the runs relies on."""
    ends = [0] * plan.num_seqs
    for r in range(runs.num_runs):
        start, stop = int(runs.run_start[r]), int(runs.run_stop[r])
        members = runs.members(r).tolist()
        assert len(members) >= 2 and members == sorted(set(members))
        assert runs.run_seq[r] in members
        assert start < stop and start % granularity == 0 and stop % granularity == 0
        blocks = -(-stop // plan.block_size)
        for s in members:
            assert start == ends[s], "runs of a sequence are disjoint, ascending, without a gap"
            ends[s] = stop
            assert plan.host_kv_lens[s] - plan.host_query_lens[s] >= stop
            assert plan.host_query_lens[s] > 0
            same = plan.host_block_tables[s, :blocks]
            assert (same == plan.host_block_tables[runs.run_seq[r], :blocks]).all()
    assert runs.own_start.tolist() == ends
    assert runs.seq_ptr[-1] == len(runs.seqs)
    arrays = (runs.run_seq, runs.run_start, runs.run_stop, runs.seq_ptr, runs.seqs, runs.own_start)
    assert all(array.dtype == np.int32 for array in arrays)


def saved(runs: SharedRuns, plan: AttentionPlan, cost: CostModel) -> float:
    total = -cost.step
    for r in range(runs.num_runs):
        members = runs.members(r)
        tokens = int(runs.run_stop[r] - runs.run_start[r])
        total += (len(members) - 1) * tokens * cost.token - cost.run
        total -= int(plan.host_query_lens[members].sum()) * cost.row
    return total


@settings(max_examples=120, deadline=None)
@given(plans(), st.integers(1, 6))
def test_where_sharing_is_free_each_unit_is_read_once(
    plan: AttentionPlan, granularity: int
) -> None:
    groups = [
        (key[0], frozenset(seqs))
        for key, seqs in sharers_of_units(plan, granularity).items()
        if len(seqs) > 1
    ]
    runs = shared_runs(plan, granularity, FREE)
    if runs is None:
        assert not groups
        return
    check(plan, runs, granularity)
    read = [
        (stop, frozenset(runs.members(r).tolist()))
        for r in range(runs.num_runs)
        for stop in range(
            int(runs.run_start[r]) + granularity, int(runs.run_stop[r]) + 1, granularity
        )
    ]
    assert sorted(read, key=str) == sorted(groups, key=str)


@settings(max_examples=120, deadline=None)
@given(
    plans(),
    st.integers(1, 4),
    st.builds(
        CostModel,
        token=st.just(1.0),
        run=st.sampled_from((0.0, 3.0, 10.0)),
        row=st.sampled_from((0.0, 0.5, 2.0)),
        step=st.sampled_from((0.0, 8.0)),
    ),
)
def test_what_is_shared_pays_and_dropping_any_level_saves_less(
    plan: AttentionPlan, granularity: int, cost: CostModel
) -> None:
    runs = shared_runs(plan, granularity, cost)
    if runs is None:
        return
    check(plan, runs, granularity)
    assert saved(runs, plan, cost) > 0
    for r in range(runs.num_runs):
        below = [
            b
            for b in range(runs.num_runs)
            if runs.run_start[b] == runs.run_stop[r]
            and set(runs.members(b).tolist()) <= set(runs.members(r).tolist())
        ]
        kept = sum(len(runs.members(b)) - 1 for b in below)
        tokens = int(runs.run_stop[r] - runs.run_start[r])
        gain = tokens * (len(runs.members(r)) - 1 - kept) * cost.token - cost.run
        assert gain > int(plan.host_query_lens[runs.members(r)].sum()) * cost.row


def test_runs_nest_as_prompts_branch() -> None:
    shared, document = list(range(10)), list(range(20, 25))
    tables = [shared + document + [100 + s] for s in range(4)]
    tables += [shared + [200 + s] * 6 for s in range(4)]
    order = [4, 0, 5, 1, 6, 2, 7, 3]
    plan = make_plan([tables[i] for i in order], [1, 30] * 4, [256] * 8, 16)
    runs = shared_runs(plan, 16, FREE)
    assert runs is not None
    check(plan, runs, 16)
    assert runs.run_start.tolist() == [0, 160] and runs.run_stop.tolist() == [160, 224]
    assert runs.members(0).tolist() == list(range(8))
    assert runs.members(1).tolist() == [1, 3, 5, 7]
    assert runs.own_start.tolist() == [160, 224] * 4


def test_a_level_too_short_to_pay_is_read_by_each_branch_below() -> None:
    tables = [[0, *range(10, 30), 100], [0, *range(10, 30), 101]]
    tables += [[0, *range(40, 60), 102], [0, *range(40, 60), 103]]
    plan = make_plan(tables, [1] * 4, [16 * 22] * 4, 16)
    runs = shared_runs(plan, 16, CostModel(token=1.0, run=20.0))
    assert runs is not None
    check(plan, runs, 16)
    assert runs.run_start.tolist() == [0, 0] and runs.run_stop.tolist() == [336, 336]


def test_a_unit_counts_only_when_all_new_tokens_stand_behind_it() -> None:
    tables = [list(range(8)), list(range(8))]
    runs = shared_runs(make_plan(tables, [1, 70], [128, 128], 16), 32, FREE)
    assert runs is not None and runs.run_stop.tolist() == [32]
    assert shared_runs(make_plan(tables, [1, 100], [128, 128], 16), 32, FREE) is None
    assert shared_runs(make_plan(tables, [1, 0], [128, 128], 16), 32, FREE) is None


@pytest.mark.parametrize("tables", [[], [[1, 2]], [[1, 2], [3, 2]]])
def test_nothing_in_common_is_none(tables: list[list[int]]) -> None:
    assert shared_runs(make_plan(tables, [1] * len(tables), [8] * len(tables), 4), 1, FREE) is None


def test_the_answer_is_kept_with_the_plan() -> None:
    plan = make_plan([[1, 2], [1, 3]], [1, 1], [8, 8], 4)
    assert shared_runs(plan, 4, FREE) is shared_runs(plan, 4, CostModel(1.0))
    assert shared_runs(plan, 4, CostModel(1.0, run=100.0)) is None


def test_a_granularity_of_nothing_is_refused() -> None:
    plan: Any = make_plan([[1]], [1], [1], 1)
    with pytest.raises(ValueError, match="granularity"):
        shared_runs(plan, 0, FREE)


def test_a_plan_may_forbid_sharing() -> None:
    plan = AttentionPlan.build([1, 1], [8, 8], [[1, 2], [1, 3]], 4, share=False)
    assert shared_runs(plan, 4, FREE) is None
