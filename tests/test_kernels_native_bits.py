"""Compiled attention gives a row the same bits in any company: the promise, tested bit for bit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from radixkv.kernels import native, native_attention
from radixkv.kernels.attention import paged_attention
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel, shared_runs
from tests.kernel_cases import Case, make_tree_case, tree_cases

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="no compiled kernels here"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
random_steps = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", autouse=True)
def sharing_is_free() -> Iterator[None]:
    """Share whatever can be shared: the bits must not depend on what is worth it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_attention, "COST", CostModel(token=1.0))
        yield


def planned(case: Case, seqs: list[int], new: list[int], lens: list[int]) -> AttentionPlan:
    plan = case.plan
    return AttentionPlan.build(new, lens, plan.host_block_tables[seqs], plan.block_size)


def rows(case: Case, seq: int) -> slice:
    start, stop = case.plan.host_cu_seqlens_q[seq : seq + 2]
    return slice(int(start), int(stop))


def without_sharing(case: Case) -> Case:
    """The same step with every sequence's blocks copied to blocks of its own."""
    plan = case.plan
    counts = -(-plan.host_kv_lens // plan.block_size)
    used = np.arange(plan.host_block_tables.shape[1]) < counts[:, None]
    old = torch.from_numpy(plan.host_block_tables[used].astype(np.int64))
    tables = np.full_like(plan.host_block_tables, len(old))
    tables[used] = np.arange(len(old))
    nothing = torch.full_like(case.k_pool[:1], torch.nan)
    k, v = (torch.cat([pool[old], nothing]) for pool in (case.k_pool, case.v_pool))
    copy = AttentionPlan.build(plan.host_query_lens, plan.host_kv_lens, tables, plan.block_size)
    assert shared_runs(copy, 1, CostModel(token=1.0)) is None
    return dataclasses.replace(case, k_pool=k, v_pool=v, plan=copy)


@random_steps
@given(tree_cases(dtypes=DTYPES))
def test_shared_runs_agree_with_float64_on_any_step(case: Case) -> None:
    case.check("native")


@random_steps
@given(tree_cases(dtypes=DTYPES))
def test_what_is_read_once_for_many_has_the_bits_of_what_each_reads_itself(case: Case) -> None:
    """DETERM: a shared run changes no bit."""
    assert torch.equal(case.run("native"), without_sharing(case).run("native"))


@random_steps
@given(tree_cases(dtypes=DTYPES))
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(case: Case) -> None:
    """DETERM: the company of a row changes no bit."""
    together = case.run("native")
    for s in range(case.plan.num_seqs):
        new, length = int(case.plan.host_query_lens[s]), int(case.plan.host_kv_lens[s])
        plan = planned(case, [s], [new], [length])
        alone = dataclasses.replace(case, q=case.q[rows(case, s)], plan=plan)
        assert torch.equal(alone.run("native"), together[rows(case, s)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((9, 3, 64), {}),
        ((8, 1, 16), {"sinks": True, "soft_cap": 3.0}),
        ((3, 3, 256), {"alibi": True}),
        ((4, 2, 80), {"sliding_window": 70}),
    ],
)
def test_a_position_has_the_same_bits_decoded_prefilled_and_in_any_chunk(
    dtype: torch.dtype, heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """DETERM: neither the hit length nor the chunk borders nor the phase change a bit."""
    num_q_heads, num_kv_heads, head_dim = heads
    case = make_tree_case(
        [(0, 0)],
        [600],
        [600],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        **options,
    )
    whole = case.run("native")
    for p in (*range(0, 600, 53), 254, 255, 256, 257, 511, 512, 599):
        one = planned(case, [0], [1], [p + 1])
        decoded = dataclasses.replace(case, q=case.q[p : p + 1], plan=one).run("native")
        assert torch.equal(decoded, whole[p : p + 1]), f"position {p}"
    for chunk in (2, 3, 31, 256, 300):
        for start in (*range(0, 600, max(chunk, 97)),):
            stop = min(600, start + chunk)
            part = planned(case, [0], [stop - start], [stop])
            got = dataclasses.replace(case, q=case.q[start:stop], plan=part).run("native")
            assert torch.equal(got, whole[start:stop]), f"chunk {start}:{stop}"


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    for lens, new in (([2500], [1]), ([900, 700, 300], [1, 1, 9]), ([800] * 12, [1] * 12)):
        case = make_tree_case([(0, 32)] * len(lens), new, lens, num_q_heads=9, num_kv_heads=3)
        one = case.run("native")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(case.run("native"), one)
        finally:
            torch.set_num_threads(before)


def test_keys_behind_a_row_change_no_bit_even_if_they_are_not_finite() -> None:
    case = make_tree_case([(0, 0)], [300], [300], num_q_heads=6)
    whole = case.run("native")
    slots = case.plan.slots_of(0, 290, 300)
    v = case.v_pool.clone()
    v.flatten(0, 1)[slots] = torch.inf
    changed = dataclasses.replace(case, v_pool=v).run("native")
    assert torch.equal(changed[:290], whole[:290]) and not changed[290:].isfinite().any()


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_over_a_half_pool_are_not_rounded(pool_dtype: torch.dtype) -> None:
    case = make_tree_case([(0, 0), (0, 20)], [1, 9], [400, 500], num_q_heads=6)
    half = dataclasses.replace(
        case, k_pool=case.k_pool.to(pool_dtype), v_pool=case.v_pool.to(pool_dtype)
    )
    full = dataclasses.replace(half, k_pool=half.k_pool.float(), v_pool=half.v_pool.float())
    assert torch.equal(half.run("native"), full.run("native"))


def test_a_table_that_points_outside_the_pool_is_refused() -> None:
    case = make_tree_case([(0, 0)], [1], [40])
    tables = case.plan.host_block_tables.copy()
    for bad in (len(case.k_pool), -1):
        tables[0, 2] = bad
        plan = AttentionPlan.build([1], [40], tables, 16)
        with pytest.raises(IndexError, match=r"block_tables\[0\]"):
            paged_attention(case.q, case.k_pool, case.v_pool, plan, scale=1.0, backend="native")
