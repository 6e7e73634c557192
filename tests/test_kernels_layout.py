"""Where the blocks of a pool lie in memory."""

import pytest
import torch

from radixkv.kernels.layout import KVPool
from tests.kernel_cases import random_pool


def test_a_run_of_blocks_is_a_contiguous_range_of_tokens() -> None:
    pool = random_pool()
    assert pool.k[1].shape == pool.v[0].shape == (6, 4, 3, 8)
    run = pool.k[1][2:5].flatten(0, 1)
    assert run.shape == (12, 3, 8) and run.is_contiguous()
    assert run.data_ptr() == pool.k[1][2].data_ptr()
    assert (pool.num_layers, pool.num_blocks, pool.block_size) == (2, 6, 4)
    assert (pool.num_kv_heads, pool.head_dim, pool.dtype) == (3, 8, torch.float32)


def test_bytes_per_block_times_blocks_is_the_memory_taken() -> None:
    pool = random_pool(dtype=torch.bfloat16)
    per_block = KVPool.bytes_per_block(2, 4, 3, 8, torch.bfloat16)
    assert per_block * pool.num_blocks == pool.data.numel() * pool.data.element_size()


def test_an_empty_or_integer_pool_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="shape"):
        KVPool.allocate(2, 0, 4, 3, 8, torch.float32)
    with pytest.raises(ValueError, match="dtype"):
        KVPool.allocate(2, 1, 4, 3, 8, torch.int32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_pool_has_a_scale_for_each_head_vector(dtype: torch.dtype) -> None:
    pool = KVPool.allocate(2, 6, 4, 3, 8, dtype)
    assert pool.scales is not None and pool.scales.dtype == torch.float32
    k_scales, v_scales = pool.k_scales[1], pool.v_scales[1]
    assert k_scales is not None and v_scales is not None
    assert k_scales.shape == v_scales.shape == (6, 4, 3)
    assert k_scales.data_ptr() == pool.scales[0, 1].data_ptr()
    assert v_scales.data_ptr() == pool.scales[1, 1].data_ptr()
    taken = pool.data.numel() + pool.scales.numel() * 4
    assert pool.block_bytes * pool.num_blocks == taken
    assert KVPool.bytes_per_block(2, 4, 3, 8, dtype) == pool.block_bytes


def test_another_pool_has_no_scales_and_wrong_scales_are_refused() -> None:
    plain = random_pool()
    assert plain.scales is None and plain.k_scales == plain.v_scales == (None, None)
    codes = torch.zeros(2, 2, 6, 4, 3, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="scales must be contiguous float32"):
        KVPool.over(codes)
    with pytest.raises(ValueError, match="scales must be contiguous float32"):
        KVPool.over(codes, torch.zeros(2, 2, 6, 4, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match="scales must be None"):
        KVPool.over(plain.data, torch.zeros(2, 2, 6, 4, 3))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
def test_an_eight_bit_float_that_others_read_otherwise_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        KVPool.allocate(2, 1, 4, 3, 8, dtype)
