"""The work lists: each key that a query sees is attended once, and each part merged once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel, shared_runs
from radixkv.kernels.triton_work import Sizes, Work, list_work
from tests.triton_cases import tree_tables

EAGER = CostModel(token=1.0)


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    block_size = draw(st.sampled_from((1, 3, 16)))
    lens, tables = tree_tables(draw, block_size, max_seqs=7, max_new=40, max_own=90)
    return AttentionPlan.build(*lens, tables, block_size)


def keys_of_queries(
    plan: AttentionPlan, work: Work, window: int | None, s: Sizes
) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
    """Say which keys each row attends, and which slots it writes (-1: the result)."""
    keys: dict[int, list[int]] = {t: [] for t in range(plan.num_tokens)}
    slots: dict[int, set[int]] = {t: set() for t in range(plan.num_tokens)}
    position = plan.positions.tolist()

    def attend(row: int, start: int, stop: int, slot: int) -> None:
        if window is not None:
            start = max(start, position[row] - window + 1)
        keys[row] += range(start, min(stop, position[row] + 1))
        assert slot not in slots[row]
        slots[row].add(slot)

    first_row = plan.host_cu_seqlens_q.tolist()
    for seq, start, slot in work.decode.tolist():
        assert start % s.split == 0
        attend(first_row[seq], start, start + s.split, slot)
    for seq, first, start, slot, parts in work.prefill.tolist():
        for nth in range(first, min(first + s.prefill_queries, int(plan.host_query_lens[seq]))):
            at = slot if slot < 0 else slot + (nth - first) * parts
            attend(first_row[seq] + nth, start, 1 << 30, at)
    for seq, start, stop, first, last, piece in work.runs.tolist():
        assert start % s.split == stop % s.split == 0 and 0 < last - first <= s.run_queries
        for row, slot in work.run_queries[first:last].tolist():
            owner = int(np.searchsorted(plan.host_cu_seqlens_q, row, side="right")) - 1
            same = plan.slots_of(seq, start, stop) == plan.slots_of(owner, start, stop)
            assert same.all() and position[row] >= stop
            attend(row, start, stop, slot + piece)
    return keys, slots


@settings(max_examples=150, deadline=None)
@given(
    plans(),
    st.sampled_from((None, None, 20, 64, 100)),
    st.booleans(),
    st.sampled_from((16, 32)),
    st.sampled_from((1, 3, 8)),
    st.sampled_from((4, 64)),
)
def test_every_visible_key_is_attended_once_and_every_part_merged_once(
    plan: AttentionPlan,
    window: int | None,
    share: bool,
    split: int,
    queries: int,
    num_kv_heads: int,
) -> None:
    s = Sizes(split, 2 * queries, 2 * split, queries, num_kv_heads)
    runs = shared_runs(plan, split, EAGER) if share else None
    work = list_work(plan, window, runs, s)
    keys, slots = keys_of_queries(plan, work, window, s)
    merged = {row: (first, parts) for row, first, parts in work.merge.tolist()}
    assert len(merged) == len(work.merge)
    used: list[int] = []
    for row, position in enumerate(plan.positions.tolist()):
        first_key = 0 if window is None else max(0, position - window + 1)
        assert sorted(keys[row]) == list(range(first_key, position + 1))
        if row in merged:
            first, parts = merged[row]
            assert slots[row] == set(range(first, first + parts)) and parts > 1
            used += range(first, first + parts)
        else:
            assert slots[row] == {-1}
    assert sorted(used) == list(range(work.num_slots))


def test_a_shared_prefix_is_read_by_far_fewer_programs() -> None:
    tables = np.concatenate([np.tile(np.arange(64), (32, 1)), 64 + np.arange(32)[:, None]], axis=1)
    plan = AttentionPlan.build([1] * 32, [64 * 16 + 5] * 32, tables, 16)
    s = Sizes(split=256, prefill_queries=32, run=512, run_queries=16, num_kv_heads=8)
    flat = list_work(plan, None, None, s)
    tree = list_work(plan, None, shared_runs(plan, 256, EAGER), s)
    assert len(flat.decode) == 32 * 5
    assert len(tree.decode) == 32 and len(tree.runs) == 2 * 2  # pieces x stacks of queries


def test_many_queries_under_a_run_make_its_pieces_longer() -> None:
    tables = np.tile(np.arange(512), (256, 1))
    plan = AttentionPlan.build([8] * 256, [512 * 16] * 256, tables, 16)
    s = Sizes(split=256, prefill_queries=32, run=512, run_queries=16, num_kv_heads=8)
    work = list_work(plan, None, shared_runs(plan, 256, EAGER), s)
    assert len(work.runs) == 128 * 2 and len(work.runs) * s.num_kv_heads <= 2048


def test_a_sequence_that_fills_programs_by_itself_keeps_out_of_company() -> None:
    tables = np.concatenate([np.tile(np.arange(32), (3, 1)), 32 + np.arange(12).reshape(3, 4)], 1)
    plan = AttentionPlan.build([64, 1, 2], [576, 513, 514], tables, 16)
    s = Sizes(split=256, prefill_queries=32, run=512, run_queries=16, num_kv_heads=8)
    work = list_work(plan, None, shared_runs(plan, 256, EAGER), s)
    assert work.runs.tolist() == [[0, 0, 512, 0, 3, 0]]
    assert work.run_queries[:, 0].tolist() == [64, 65, 66]
    assert sorted(work.prefill[:, 2].tolist()) == [0, 0, 512]
