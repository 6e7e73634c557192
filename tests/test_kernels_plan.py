"""The index vectors of a step against a loop over its tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.plan import AttentionPlan


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=6),
    st.sampled_from((1, 2, 3, 16)),
    st.integers(0, 2**16),
)
def test_slots_and_positions_are_what_a_loop_over_the_tokens_says(
    sequences: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    query_lens = [n for n, _ in sequences]
    kv_lens = [n + cached for n, cached in sequences]
    width = -(-max(kv_lens, default=0) // block_size)
    tables = np.random.default_rng(seed).integers(0, 100, (len(sequences), width))
    plan = AttentionPlan.build(query_lens, kv_lens, tables, block_size)

    slots, positions = [], []
    for s, (n, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        for position in range(length - n, length):
            positions.append(position)
            block = tables[s, position // block_size]
            slots.append(block * block_size + position % block_size)
        everything = [
            tables[s, p // block_size] * block_size + p % block_size for p in range(length)
        ]
        first = length // 3
        assert plan.slots_of(s, first, length).tolist() == everything[first:]
    assert plan.slots.tolist() == slots
    assert plan.positions.tolist() == positions
    assert plan.cu_seqlens_q.tolist() == np.concatenate([[0], np.cumsum(query_lens)]).tolist()
    assert plan.num_tokens == sum(query_lens) and plan.num_seqs == len(sequences)
    assert plan.max_query_len == max(query_lens, default=0)
    assert plan.max_kv_len == max(kv_lens, default=0)
    assert plan.decode_seqs.tolist() == [s for s, n in enumerate(query_lens) if n == 1]
    assert plan.prefill_seqs.tolist() == [s for s, n in enumerate(query_lens) if n > 1]


def test_a_plan_keeps_its_own_copy_of_the_tables() -> None:
    tables = np.array([[3, 1]], dtype=np.int32)
    plan = AttentionPlan.build([1], [20], tables, 16)
    tables[:] = 0
    assert plan.block_tables.tolist() == [[3, 1]]


def test_what_is_derived_from_a_plan_is_made_once() -> None:
    plan = AttentionPlan.build([1], [1], [[0]], 16)
    made: list[int] = []
    assert plan.once("a", lambda: made.append(1) or 7) == 7  # type: ignore[func-returns-value]
    assert plan.once("a", lambda: made.append(2) or 8) == 7  # type: ignore[func-returns-value]
    assert made == [1]


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "tables", "name"),
    [
        ([2], [1], [[0]], "kv_lens"),
        ([-1], [1], [[0]], "query_lens"),
        ([1, 1], [1], [[0], [0]], "kv_lens"),
        ([1], [17], [[0]], "block_tables"),
        ([1], [1], [[0], [1]], "block_tables"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_by_name(
    query_lens: list[int], kv_lens: list[int], tables: list[list[int]], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        AttentionPlan.build(query_lens, kv_lens, tables, 16)
