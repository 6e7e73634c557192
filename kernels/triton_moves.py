"""Copies, gathers and scatters blocks on GPUs, all layers in one launch; knows words, no values.

Imported only where triton is installed. The pool is seen as planes (keys and values of each layer)
of blocks of words, the widest integers that its vectors can be cut into; scales are words as well.
References: ``copy.copy_torch``, ``gather.gather_torch``, ``gather.scatter_torch``.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import expect
from radixkv.kernels.copy import Moves
from radixkv.kernels.layout import KVPool

TILE = 2048  # words that one program moves
NUM_WARPS = 4
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _copy_kernel(
    data,  # [planes, num_blocks, block_size, token_words]
    scales,  # [planes, num_blocks, block_size, token_scales]
    to_data,  # the same of another pool, or the same again
    to_scales,
    moves,  # int32 [n, 3]: source block, target block, valid tokens
    num_blocks,
    to_num_blocks,
    block_size,
    token_words,
    token_scales,
    HAS_SCALES: tl.constexpr,
    TILE: tl.constexpr,
):
    move, plane, first = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * TILE
    source = (plane * num_blocks + tl.load(moves + move * 3)) * block_size
    target = (plane * to_num_blocks + tl.load(moves + move * 3 + 1)) * block_size
    valid = tl.load(moves + move * 3 + 2)
    _move_words(data + source * token_words, to_data + target * token_words,
                first, valid * token_words, TILE)  # fmt: skip
    if HAS_SCALES:
        _move_words(scales + source * token_scales, to_scales + target * token_scales,
                    first, valid * token_scales, TILE)  # fmt: skip


@triton.jit
def _swap_kernel(
    data,  # [planes, num_blocks, block_words]
    scales,  # [planes, num_blocks, block_scales]
    records,  # [n, planes * block_words + planes * block_scales]
    ids,  # [n]
    num_blocks,
    num_planes,
    block_words,
    block_scales,
    HAS_SCALES: tl.constexpr,
    TO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    nth, plane, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TILE
    block = tl.load(ids + nth).to(tl.int64)
    inside = (block >= 0) & (block < num_blocks)
    at = plane.to(tl.int64) * num_blocks + block
    record = records + nth.to(tl.int64) * num_planes * (block_words + block_scales)
    _swap_words(data + at * block_words, record + plane * block_words,
                first, block_words, inside, TO_POOL, TILE)  # fmt: skip
    if HAS_SCALES:
        behind = record + num_planes * block_words
        _swap_words(scales + at * block_scales, behind + plane * block_scales,
                    first, block_scales, inside, TO_POOL, TILE)  # fmt: skip


@triton.jit
def _move_words(source, target, first, stop, TILE: tl.constexpr):
    word = first + tl.arange(0, TILE)
    tl.store(target + word, tl.load(source + word, mask=word < stop), mask=word < stop)


@triton.jit
def _swap_words(block, record, first, stop, inside, TO_POOL: tl.constexpr, TILE: tl.constexpr):
    word = first + tl.arange(0, TILE)
    there, live = word < stop, word < tl.where(inside, stop, 0)
    if TO_POOL:
        tl.store(block + word, tl.load(record + word, mask=live), mask=live)
    else:
        tl.store(record + word, tl.load(block + word, mask=live, other=0), mask=there)


def copy_triton(pool: KVPool, moves: Moves) -> None:
    """Copy as ``copy_blocks`` says; one launch, or two where a target is also a source."""
    _check(pool)
    if not np.isin(moves[:, 0], moves[:, 1]).any():
        _copy(pool, pool, moves)
        return
    # Programs run in any order, so what would be written over is set aside first.
    shape, count = pool.data.shape, len(moves)
    data = pool.data.new_empty((*shape[:2], count, *shape[3:]))
    scales = None if pool.scales is None else pool.scales.new_empty(data.shape[:-1])
    aside = KVPool.over(data, scales)
    nth = np.arange(count)
    _copy(pool, aside, np.stack([moves[:, 0], nth, moves[:, 2]], axis=1))
    _copy(aside, pool, np.stack([nth, moves[:, 1], moves[:, 2]], axis=1))


def gather_triton(pool: KVPool, ids: torch.Tensor) -> torch.Tensor:
    """Gather as ``gather_blocks`` says; one launch. An id outside the pool gives zeros."""
    records = torch.empty((len(ids), pool.block_bytes), dtype=torch.uint8, device=pool.device)
    _swap(pool, ids, records, to_pool=False)
    return records


def scatter_triton(pool: KVPool, ids: torch.Tensor, records: torch.Tensor) -> None:
    """Scatter as ``scatter_blocks`` says; one launch. An id outside the pool is passed over."""
    _swap(pool, ids, records, to_pool=True)


def _copy(source: KVPool, target: KVPool, moves: Moves) -> None:
    """Copy valid entries between pools that differ in the number of blocks at most."""
    words = _words(source)
    data, scales = _as_words(source, words)
    to_data, to_scales = _as_words(target, words)
    token_words, token_scales = _token_words(source, words)
    packed = torch.from_numpy(moves.astype(np.int32))
    if source.device.type != "cpu":
        # From pageable memory the host would wait for the transfer.
        packed = packed.pin_memory().to(source.device, non_blocking=True)
    longest = int(moves[:, 2].max()) * max(token_words, token_scales)
    chunks = triton.cdiv(longest, TILE)
    if chunks:
        _copy_kernel[(len(moves), 2 * source.num_layers, chunks)](
            data,
            scales,
            to_data,
            to_scales,
            packed,
            source.num_blocks,
            target.num_blocks,
            source.block_size,
            token_words,
            token_scales,
            HAS_SCALES=source.scales is not None,
            TILE=TILE,
            **options(),
        )


def _swap(pool: KVPool, ids: torch.Tensor, records: torch.Tensor, *, to_pool: bool) -> None:
    _check(pool)
    words = _words(pool)
    data, scales = _as_words(pool, words)
    block_words, block_scales = (pool.block_size * n for n in _token_words(pool, words))
    if len(ids):
        chunks = triton.cdiv(max(block_words, block_scales), TILE)
        _swap_kernel[(len(ids), 2 * pool.num_layers, chunks)](
            data,
            scales,
            records.view(words),
            ids,
            pool.num_blocks,
            2 * pool.num_layers,
            block_words,
            block_scales,
            HAS_SCALES=pool.scales is not None,
            TO_POOL=to_pool,
            TILE=TILE,
            **options(),
        )


def options() -> dict[str, Any]:
    """Name the compiler's options."""
    return {"num_warps": NUM_WARPS, "num_stages": 1, "enable_fp_fusion": False}


def _words(pool: KVPool) -> torch.dtype:
    """The widest integer that a head vector is a whole number of."""
    vector_bytes = pool.head_dim * pool.dtype.itemsize
    return next(word for size, word in WORDS.items() if vector_bytes % size == 0)


def _as_words(pool: KVPool, word: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """View data and scales as words; without scales the data stands for them, never read."""
    return pool.data.view(word), (pool.data if pool.scales is None else pool.scales).view(word)


def _token_words(pool: KVPool, word: torch.dtype) -> tuple[int, int]:
    """Words of a token in one plane: of its data, and of its scales."""
    size, heads = word.itemsize, pool.num_kv_heads
    scales = 0 if pool.scales is None else heads * 4 // size
    return heads * pool.head_dim * pool.dtype.itemsize // size, scales


def _check(pool: KVPool) -> None:
    interpreted = bool(triton.knobs.runtime.interpret)
    wanted = "on a GPU (or run with TRITON_INTERPRET=1)"
    expect(pool.data.is_cuda or interpreted, "pool.data", wanted, pool.data)
