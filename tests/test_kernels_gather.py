"""Blocks leave the pool as records and come back unchanged."""

import pytest
import torch

from radixkv.kernels.gather import gather_blocks, scatter_blocks
from tests.kernel_cases import random_pool
from tests.moves_cases import Shape, assert_same_bits, moved


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gathered_blocks_are_contiguous_records_and_scatter_puts_them_back(
    dtype: torch.dtype,
) -> None:
    pool = random_pool(dtype=torch.bfloat16)
    before = pool.data.clone()
    ids = torch.tensor([4, 0, 2], dtype=dtype)
    records = gather_blocks(pool, ids)
    assert records.shape == (3, pool.block_bytes) and records.is_contiguous()
    record = records[1].view(torch.bfloat16).view(2, 2, 4, 3, 8)
    assert torch.equal(record, before[:, :, 0])
    pool.data.zero_()
    scatter_blocks(pool, ids, records)
    assert torch.equal(pool.data[:, :, [4, 0, 2]], before[:, :, [4, 0, 2]])
    assert not pool.data[:, :, [1, 3, 5]].any()
    with pytest.raises(ValueError, match="records"):
        scatter_blocks(pool, ids[:2], records)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_lie_behind_the_codes_of_their_block(dtype: torch.dtype) -> None:
    want = Shape(2, 6, 4, 3, 8, dtype, seed=0).pool()
    pool = moved(want, "cpu")
    assert want.scales is not None and pool.scales is not None
    ids = torch.tensor([4, 0, 2])
    records = gather_blocks(pool, ids)
    end = 2 * 2 * 4 * 3 * 8
    codes, scales = records[1, :end], records[1, end:]
    assert torch.equal(codes.view(2, 2, 4, 3, 8), want.data.view(torch.uint8)[:, :, 0])
    assert torch.equal(scales.view(2, 2, 4, 12), want.scales.view(torch.uint8)[:, :, 0])
    pool.data.view(torch.uint8).zero_()
    pool.scales.zero_()
    scatter_blocks(pool, torch.arange(6), gather_blocks(want, torch.arange(6)))
    assert_same_bits(pool, want)


def test_an_id_outside_the_pool_or_of_another_type_is_refused_on_the_cpu() -> None:
    pool = random_pool()
    before = pool.data.clone()
    records = gather_blocks(pool, torch.tensor([0, 1]))
    for bad in (-1, 6):
        with pytest.raises(IndexError):
            gather_blocks(pool, torch.tensor([0, bad]))
        with pytest.raises(IndexError):
            scatter_blocks(pool, torch.tensor([2, bad]), records)
    with pytest.raises(ValueError, match="ids"):
        gather_blocks(pool, torch.tensor([0.0]))
    assert torch.equal(pool.data, before)


def test_no_block_is_a_record_of_no_rows() -> None:
    pool = random_pool()
    records = gather_blocks(pool, torch.empty(0, dtype=torch.int64))
    assert records.shape == (0, pool.block_bytes)
    scatter_blocks(pool, torch.empty(0, dtype=torch.int64), records)
