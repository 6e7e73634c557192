"""Run by ``test_kernels_triton`` in a process of its own, under TRITON_INTERPRET=1."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.kernels import triton_attention
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel
from radixkv.kernels.triton_attention import Tuning, paged_attention_triton
from radixkv.kernels.triton_call import Partials
from radixkv.kernels.triton_merge import merge, merge_reference
from tests.kernel_cases import fresh_memory_is_nan, make_case
from tests.triton_cases import FLAT, POOLS, SHARE, Step, make_step, steps

__all__ = ["fresh_memory_is_nan"]
HALVES = (torch.bfloat16, torch.float16)
SMALL = Tuning(split=16, run=32, cost=SHARE)  # float32 tiles hold 16 keys
MEDIUM = Tuning(split=64, run=64, cost=SHARE)
often = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def run(
    step: Step, tuning: Tuning | None = None, plan: AttentionPlan | None = None
) -> torch.Tensor:
    return paged_attention_triton(
        step.q,
        step.k_pool,
        step.v_pool,
        plan or step.plan,
        step.features,
        step.k_scales,
        step.v_scales,
        tuning=tuning,
    )


@often
@given(steps((torch.float32,), max_own=70))
def test_shared_runs_at_all_levels_agree_with_float64(step: Step) -> None:
    """CORRECT: poisoned blocks, slots past the length and keys outside the window never leak."""
    step.check(run(step, SMALL))


@often
@given(steps(HALVES, max_own=150), st.sampled_from((SHARE, FLAT)))
def test_half_types_agree_with_float64_flat_or_shared(step: Step, cost: CostModel) -> None:
    step.check(run(step, dataclasses.replace(MEDIUM, cost=cost)))


def branching(dtype: torch.dtype = torch.float32, **kwargs: object) -> Step:
    """Two documents under one prompt, questions under each; one sequence prefills, one is alone."""
    prompt, first, second = list(range(6)), list(range(6, 14)), list(range(14, 18))
    rows: list[list[int]] = [
        [*prompt, *first],
        [*prompt, *first],
        [*prompt, *second],
        [*prompt, *second],
        prompt,
    ]
    tables = np.zeros((6, 20), dtype=np.int32)
    for s, row in enumerate(rows):
        tables[s, : len(row)] = row
        tables[s, len(row) :] = 18 + 20 * s + np.arange(20 - len(row))
    tables[5] = 118 + np.arange(20)
    lens = ([1, 5, 1, 1, 1, 1], [240, 300, 165, 180, 97, 130])
    return make_step(*lens, tables, 16, dtype=dtype, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which kernels run; they run all the same."""
    names: list[str] = []
    for name in ("attend_runs", "decode", "prefill", "merge"):
        kernel = getattr(triton_attention, name)

        def noted(*args: object, name: str = name, kernel: object = kernel) -> None:
            names.append(name)
            kernel(*args)  # type: ignore[operator]

        monkeypatch.setattr(triton_attention, name, noted)
    return names


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
def test_three_levels_of_sharing_with_every_feature(
    pool_dtype: torch.dtype | None, launched: list[str]
) -> None:
    features = ("soft cap", "sinks", "alibi")
    step = branching(pool_dtype=pool_dtype, features=features, sliding_window=150)
    step.check(run(step, SMALL))
    assert launched == ["attend_runs", "decode", "prefill", "merge"]


def test_short_contexts_take_one_launch_and_no_merge(launched: list[str]) -> None:
    case = make_case([1, 1, 1], [1, 100, 256])
    case.check("triton")
    assert launched == ["decode"]


def test_where_sharing_saves_little_nothing_is_shared(launched: list[str]) -> None:
    step = branching()
    step.check(run(step))
    assert launched == ["decode", "prefill"]


def test_every_row_of_the_output_is_written(fresh_memory_is_nan: None) -> None:
    make_case([3, 1, 40], [3, 80, 64], num_q_heads=14).check("triton")
    step = branching(group=7)
    step.check(run(step, SMALL))


def test_the_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    """DETERM-3: a decoding sequence is split at fixed positions, whoever decodes beside it."""
    step = branching(torch.bfloat16)
    together = run(step, dataclasses.replace(MEDIUM, cost=FLAT))
    for s in (0, 3, 5):
        row = int(step.plan.host_cu_seqlens_q[s])
        tables = step.plan.host_block_tables[s : s + 1]
        plan = AttentionPlan.build([1], step.plan.host_kv_lens[s : s + 1], tables, 16)
        alone = dataclasses.replace(step, q=step.q[row : row + 1])
        got = run(alone, dataclasses.replace(MEDIUM, cost=FLAT), plan)
        assert torch.equal(got[0], together[row])


def test_what_was_listed_for_the_longest_lengths_serves_shorter_ones() -> None:
    """As in a replayed CUDA graph: only what lies on the device is overwritten."""
    tables = np.arange(40).reshape(2, 20)
    step = make_step([1, 1, 1], [33, 300, 64], np.vstack([tables, tables[:1] + 40]), 16)
    longest = AttentionPlan.build([1, 1, 1], [320] * 3, step.plan.host_block_tables, 16)
    longest.kv_lens.copy_(step.plan.kv_lens)
    tuning = dataclasses.replace(MEDIUM, cost=FLAT)
    assert torch.equal(run(step, tuning, longest), run(step, tuning))
    longest.kv_lens[2] = 0  # a place in the batch that nobody has
    assert torch.equal(run(step, tuning, longest)[2], torch.zeros_like(step.q[2]))


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_merge_as_in_float64_and_empty_ones_are_not_read(sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(60, 3, 80, generator=generator)
    totals = torch.rand(60, 3, generator=generator) + 0.5
    peaks = 20 * torch.randn(60, 3, generator=generator)
    empty = torch.rand(60, 3, generator=generator) < 0.3
    empty[57:] = True
    peaks[empty], totals[empty], sums[empty] = -torch.inf, 0.0, torch.nan
    partials = Partials(sums, peaks, totals)
    work = torch.tensor([[3, 0, 2], [0, 2, 16], [2, 18, 39], [1, 57, 3]], dtype=torch.int32)
    features = Features(1.0, sinks=torch.randn(3, generator=generator) if sinks else None)
    got, want = torch.full((2, 4, 3, 80), torch.nan)
    merge(work, partials, features, got)
    merge_reference(work, partials, features, want)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got[1] == 0).all()


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_tiles_of_keys_and_blocks_of_storage_need_not_match(block_size: int) -> None:
    lens = ([1, 70, 1, 0], [300, 140, 1, 5])
    options = {"num_q_heads": 6, "dtype": torch.float16, "block_size": block_size}
    make_case(*lens, **options).check("triton")  # type: ignore[arg-type]
    make_case(*lens, **options, sliding_window=50, sinks=True).check("triton")  # type: ignore[arg-type]


def test_strided_queries_are_read_right() -> None:
    case = make_case([1, 4], [40, 9])
    transposed = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    got = dataclasses.replace(case, q=transposed).run("triton")
    assert torch.equal(got, case.run("triton"))


def test_a_step_of_nothing_gives_nothing() -> None:
    for lens in (([], []), ([0, 0], [0, 5])):
        assert make_case(*lens).run("triton").shape == (0, 4, 64)


def test_pools_and_scales_that_do_not_fit_are_refused_by_name() -> None:
    case = make_case([1], [4])
    with pytest.raises(ValueError, match="q must be of the pool's"):
        dataclasses.replace(case, q=case.q.bfloat16()).run("triton")
    step = make_step([1], [4], np.zeros((1, 1), dtype=np.int32), 16, pool_dtype=torch.int8)
    with pytest.raises(ValueError, match="v_scales must be float32"):
        run(dataclasses.replace(step, v_scales=None))
    with pytest.raises(ValueError, match="scales must be of quantised pools"):
        run(dataclasses.replace(step, k_pool=step.k_pool.float(), v_pool=step.v_pool.float()))
