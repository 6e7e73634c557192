"""Blocks leave the pool as records and come back unchanged."""

import pytest
import torch

from radixkv.kernels.gather import gather_blocks, scatter_blocks
from tests.kernel_cases import random_pool


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gathered_blocks_are_contiguous_records_and_scatter_puts_them_back(
    dtype: torch.dtype,
) -> None:
    pool = random_pool(dtype=torch.bfloat16)
    before = pool.data.clone()
    ids = torch.tensor([4, 0, 2], dtype=dtype)
    records = gather_blocks(pool, ids)
    assert records.shape == (3, 2, 2, 4, 3, 8) and records.is_contiguous()
    assert torch.equal(records[1], before[:, :, 0])
    pool.data.zero_()
    scatter_blocks(pool, ids, records)
    assert torch.equal(pool.data[:, :, [4, 0, 2]], before[:, :, [4, 0, 2]])
    assert not pool.data[:, :, [1, 3, 5]].any()
    with pytest.raises(ValueError, match="data"):
        scatter_blocks(pool, ids[:2], records)
