"""Takes whole blocks out of the pool and puts them back (swap, tiers); knows block ids only."""

import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.layout import KVPool


def gather_blocks(pool: KVPool, ids: torch.Tensor) -> torch.Tensor:
    """Copy blocks into a new tensor in which each block is one contiguous record.

    ids     [n] int32 or int64 on the pool's device, each in 0..num_blocks-1; repeats allowed
    return  [n, 2, num_layers, block_size, num_kv_heads, head_dim], pool's dtype and device

    Moves 2 * n * bytes_per_block. Ids are not checked on a GPU.
    """
    expect(ids.dim() == 1, "ids", "1-d", ids)
    return pool.data.movedim(2, 0).index_select(0, ids).contiguous()


def scatter_blocks(pool: KVPool, ids: torch.Tensor, data: torch.Tensor) -> None:
    """Write records of ``gather_blocks`` to the blocks ``ids``, in place.

    ids   [n] int32 or int64 on the pool's device, distinct
    data  [n, 2, num_layers, block_size, num_kv_heads, head_dim], pool's dtype and device
    """
    shape = (len(ids), *pool.data.shape[:2], *pool.data.shape[3:])
    expect(tuple(data.shape) == shape, "data", str(shape), data)
    expect(data.dtype == pool.dtype, "data", f"of the pool's dtype {pool.dtype}", data)
    pool.data.index_copy_(2, ids.long(), data.movedim(0, 2))
