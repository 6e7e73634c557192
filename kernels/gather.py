"""Takes whole blocks out of the pool as records of bytes and puts them back (swap, tiers).

Knows block ids only. A record is all of a block, so that it can lie on a host or a disk:

    [2, num_layers, block_size, num_kv_heads, head_dim] of the pool's type, then, if the pool is
    quantised, [2, num_layers, block_size, num_kv_heads] float32 scales
"""

import torch

from radixkv.kernels.checks import expect, expect_inside
from radixkv.kernels.dispatch import runs_on_triton
from radixkv.kernels.layout import KVPool


def gather_blocks(pool: KVPool, ids: torch.Tensor) -> torch.Tensor:
    """Copy blocks into a new tensor in which each block is one contiguous record.

    ids     [n] int32 or int64 on the pool's device, repeats allowed
    return  [n, pool.block_bytes] uint8, on the pool's device

    Moves 2 * n * block_bytes, without synchronisation. An id outside the pool is an IndexError on
    the CPU; on a GPU, where looking would synchronise, its record is zeros.
    """
    _check_ids(pool, ids)
    if runs_on_triton(pool.data):
        from radixkv.kernels.triton_moves import gather_triton

        return gather_triton(pool, ids)
    return gather_torch(pool, ids)


def scatter_blocks(pool: KVPool, ids: torch.Tensor, records: torch.Tensor) -> None:
    """Write records of ``gather_blocks`` to the blocks ``ids``, in place.

    ids      [n] int32 or int64 on the pool's device, distinct
    records  [n, pool.block_bytes] uint8 contiguous, on the pool's device

    As ``gather_blocks``; on a GPU the record of an id outside the pool is dropped.
    """
    _check_ids(pool, ids)
    shape = (len(ids), pool.block_bytes)
    like = records.shape == shape and records.dtype == torch.uint8 and records.is_contiguous()
    like = like and records.device == pool.device
    expect(like, "records", f"contiguous uint8 {shape} on {pool.device}", records)
    if runs_on_triton(pool.data):
        from radixkv.kernels.triton_moves import scatter_triton

        scatter_triton(pool, ids, records)
    else:
        scatter_torch(pool, ids, records)


def gather_torch(pool: KVPool, ids: torch.Tensor) -> torch.Tensor:
    """Gather as ``gather_blocks`` says, with torch's own operators: the kernel's reference."""
    expect_inside("ids", ids, pool.num_blocks)
    parts = [x.index_select(1, ids).transpose(0, 1).flatten(1) for x in _planes(pool)]
    return torch.cat(parts, dim=1)


def scatter_torch(pool: KVPool, ids: torch.Tensor, records: torch.Tensor) -> None:
    """Scatter as ``scatter_blocks`` says, with torch's own operators: the kernel's reference."""
    expect_inside("ids", ids, pool.num_blocks)
    start = 0
    for planes in _planes(pool):
        count, _, width = planes.shape
        part = records[:, start : start + count * width].view(len(ids), count, width)
        planes.index_copy_(1, ids.long(), part.transpose(0, 1))
        start += count * width


def _planes(pool: KVPool) -> list[torch.Tensor]:
    """View the pool's tensors as bytes: [2 * num_layers, num_blocks, bytes of a block's plane]."""
    shape = (2 * pool.num_layers, pool.num_blocks, -1)
    tensors = [pool.data] if pool.scales is None else [pool.data, pool.scales]
    return [x.view(torch.uint8).view(shape) for x in tensors]


def _check_ids(pool: KVPool, ids: torch.Tensor) -> None:
    wanted = f"1-d int32 or int64 on {pool.device}"
    like = ids.dim() == 1 and ids.dtype in (torch.int32, torch.int64) and ids.device == pool.device
    expect(like, "ids", wanted, ids)
