"""Run by ``test_kernels_triton`` in a process of its own, under TRITON_INTERPRET=1."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.kernel_cases import Case, cases, fresh_memory_is_nan, make_case

__all__ = ["fresh_memory_is_nan"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=35, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(dtypes=DTYPES, max_seqs=3, max_cached=50, max_new=30))
def test_triton_agrees_with_float64_on_any_step(case: Case) -> None:
    """CORRECT: poisoned blocks, slots past the length and keys outside the window never leak."""
    case.check("triton")


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_tiles_of_keys_and_blocks_of_storage_need_not_match(block_size: int) -> None:
    lens = ([1, 70, 1, 0], [300, 140, 1, 5])
    make_case(*lens, block_size=block_size, num_q_heads=6).check("triton")
    make_case(*lens, block_size=block_size, sliding_window=50, sinks=True).check("triton")


def test_every_row_of_the_output_is_written(fresh_memory_is_nan: None) -> None:
    make_case([3, 1, 40], [3, 80, 64], num_q_heads=14).check("triton")


def test_strided_queries_are_read_right() -> None:
    case = make_case([1, 4], [40, 9])
    transposed = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    got = dataclasses.replace(case, q=transposed).run("triton")
    assert torch.equal(got, case.run("triton"))


def test_a_pool_of_another_type_is_refused_by_name() -> None:
    case = make_case([1], [4])
    with pytest.raises(ValueError, match="q must be of the pool's"):
        dataclasses.replace(case, q=case.q.bfloat16()).run("triton")
