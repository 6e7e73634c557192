"""Copies the valid part of blocks to other blocks; knows block ids and counts, nothing of why.

Copy-on-write is built on it: a private copy gets only the entries that are shared, so what another
sequence has written behind them never travels. Scales travel with their entries.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.dispatch import runs_on_triton
from radixkv.kernels.layout import KVPool
from radixkv.kernels.quant import stored

Ids = Sequence[int] | npt.NDArray[np.integer]
Moves = npt.NDArray[np.int64]
"""[n, 3]: source block, target block, valid tokens."""


def copy_blocks(pool: KVPool, sources: Ids, targets: Ids, num_valid: Ids) -> None:
    """Copy the first ``num_valid[i]`` tokens of block ``sources[i]`` to ``targets[i]``, all layers.

    sources    [n] block ids, repeats allowed
    targets    [n] block ids, distinct; one may also be a source: every source is read before any
               target is written
    num_valid  [n] tokens in 0..block_size; what lies behind them in the target is left alone

    Raises before anything is written. On a GPU it does not synchronise, and takes a temporary of
    whole blocks only where a target is also a source; elsewhere one of the size of what is copied.
    """
    moves = _checked(pool, sources, targets, num_valid)
    if not len(moves):
        return
    if runs_on_triton(pool.data):
        from radixkv.kernels.triton_moves import copy_triton

        copy_triton(pool, moves)
    else:
        copy_torch(pool, moves)


def copy_torch(pool: KVPool, moves: Moves) -> None:
    """Copy as ``copy_blocks`` says, with torch's own operators: the reference of the kernel."""
    size = pool.block_size
    source, target, valid = moves.T
    wanted = np.arange(size) < valid[:, None]
    read = torch.from_numpy((source[:, None] * size + np.arange(size))[wanted]).to(pool.device)
    write = torch.from_numpy((target[:, None] * size + np.arange(size))[wanted]).to(pool.device)
    for tensor in (pool.data, pool.scales):
        if tensor is not None:
            slots = stored(tensor).view(2 * pool.num_layers, pool.num_blocks * size, -1)
            slots.index_copy_(1, write, slots.index_select(1, read))


def _checked(pool: KVPool, sources: Ids, targets: Ids, num_valid: Ids) -> Moves:
    source, target, valid = (np.asarray(x, dtype=np.int64) for x in (sources, targets, num_valid))
    size, num_blocks = pool.block_size, pool.num_blocks
    expect(
        len(source) == len(target) == len(valid), "targets, num_valid", "as long as sources", target
    )
    for name, ids in (("sources", source), ("targets", target)):
        inside = bool((ids >= 0).all() and (ids < num_blocks).all())
        expect(inside, name, f"in 0..{num_blocks - 1}", ids.tolist())
    expect(
        bool((valid >= 0).all() and (valid <= size).all()), "num_valid", f"in 0..{size}", num_valid
    )
    expect(len(np.unique(target)) == len(target), "targets", "distinct", target.tolist())
    return np.stack([source, target, valid], axis=1)
