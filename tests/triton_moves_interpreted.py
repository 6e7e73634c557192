"""Run by ``test_kernels_moves`` in a process of its own, under TRITON_INTERPRET=1."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.kernels.mla import write_latents
from radixkv.kernels.triton_mla import write_latents_triton
from radixkv.kernels.triton_moves import gather_triton, scatter_triton
from radixkv.kernels.triton_write import write_triton
from tests.kernel_cases import fresh_memory_is_nan
from tests.moves_cases import (
    FLOATS,
    QUANTISED,
    LatentCase,
    Shape,
    check_copy,
    check_swap,
    check_write,
    latent_case,
    latent_cases,
    shapes,
)

__all__ = ["fresh_memory_is_nan"]
often = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@often
@given(shapes())
def test_blocks_and_their_scales_are_copied_bit_for_bit(shape: Shape) -> None:
    check_copy(shape, "cpu")


@often
@given(shapes())
def test_blocks_and_their_scales_swap_bit_for_bit(shape: Shape) -> None:
    check_swap(shape, "cpu")


@often
@given(shapes(QUANTISED), st.sampled_from(FLOATS))
def test_quantised_keys_have_the_reference_s_bits(shape: Shape, new: torch.dtype) -> None:
    check_write(shape, new, "cpu")


@often
@given(shapes(FLOATS), st.sampled_from(FLOATS))
def test_keys_are_written_bit_for_bit(shape: Shape, new: torch.dtype) -> None:
    if shape.dtype == torch.bfloat16:
        new = torch.bfloat16  # the interpreter truncates to bfloat16 where GPUs round
    check_write(shape, new, "cpu")


def test_every_block_of_a_record_is_written(fresh_memory_is_nan: None) -> None:
    check_swap(Shape(2, 5, 16, 3, 80, torch.float32, seed=0), "cpu")


def test_nothing_to_move_is_no_launch() -> None:
    pool = Shape(1, 2, 4, 2, 8, torch.int8, seed=0).pool()
    before = pool.data.clone()
    none = torch.empty(0, dtype=torch.int64)
    scatter_triton(pool, none, gather_triton(pool, none))
    new = torch.empty(0, 2, 8)
    write_triton(new, new, pool.k[0], pool.v[0], none, pool.k_scales[0], pool.v_scales[0])
    assert torch.equal(pool.data, before)


@often
@given(latent_cases())
def test_latent_attention_agrees_with_float64_on_any_step(case: LatentCase) -> None:
    case.check("triton")


def test_splits_of_the_keys_are_merged(fresh_memory_is_nan: None) -> None:
    latent_case([1, 2, 1], [512, 513, 1100], heads=3, rank=16).check("triton")
    latent_case([1], [1030], heads=33, rank=16).check("triton")


def test_the_bits_of_a_row_are_those_of_its_own_keys() -> None:
    """DETERM: neither the other rows nor the chunk it came in move a split's border."""
    alone, chunk = (latent_case([n], [700], seed=3) for n in (1, 5))
    row = dataclasses.replace(chunk, q_latent=chunk.q_latent[-1:], q_rope=chunk.q_rope[-1:])
    row = dataclasses.replace(row, plan=alone.plan)
    torch.testing.assert_close(row.pool, alone.pool, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(row.run("triton"), chunk.run("triton")[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_are_written_bit_for_bit(dtype: torch.dtype) -> None:
    new = torch.randn(6, 72, 2).to(dtype).unbind(2)[0]  # strided
    want = torch.zeros(3, 4, 72, dtype=dtype)
    got = want.clone()
    slots = torch.tensor([11, 0, 5, 6])
    write_latents(new[:4], want, slots)
    write_latents_triton(new, got, torch.cat([slots, torch.tensor([-1, 12])]))
    assert torch.equal(got, want)
