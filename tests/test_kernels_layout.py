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
