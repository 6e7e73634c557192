"""Attention of one new token a sequence: its keys are split at fixed positions among programs.

Imported only where triton is installed. A program attends one split with all heads of a group, so
that keys are read once. Where a sequence has a single split its result is final, else the parts are
merged (``triton_merge``). What a row's splits are, and the arithmetic in each, follows from the row
alone: its bits do not depend on the batch. Reference: ``reference.paged_attention_reference``.
"""

import torch
import triton
import triton.language as tl

from radixkv.kernels.triton_call import Call, Partials
from radixkv.kernels.triton_config import Launch
from radixkv.kernels.triton_tiles import (
    attend_keys,
    finish,
    load_queries,
    store_partial,
    store_result,
)


@triton.jit(do_not_specialize=["table_stride", "window"])
def _decode_kernel(
    q,  # [T, num_q_heads, head_dim]
    k_pool,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_pool,
    k_scales,  # [num_blocks, block_size, num_kv_heads]
    v_scales,
    out,  # [T, num_q_heads, head_dim] contiguous
    part_sums,
    part_peaks,
    part_totals,
    work,  # [n, 3] sequence, first key, slot or -1
    cu_seqlens_q,
    kv_lens,
    block_tables,
    sinks,
    slopes,
    scale,
    soft_cap,
    window,
    table_stride,
    q_row_stride,
    q_head_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,  # keys of a program
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    QUANTISED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    line = work + tl.program_id(0) // num_kv_heads * 3
    kv_head = tl.program_id(0) % num_kv_heads
    seq, start, slot = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    kv_len = tl.load(kv_lens + seq)
    stop = tl.minimum(start + SPLIT, kv_len)
    if HAS_WINDOW:
        start = tl.maximum(start, kv_len - window)

    m = tl.arange(0, BLOCK_M)
    live = m < GROUP
    head = kv_head * GROUP + m
    row = tl.load(cu_seqlens_q + seq) + tl.zeros([BLOCK_M], tl.int32)
    num_heads = num_kv_heads * GROUP
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    if start < stop:
        queries = load_queries(
            q, row, head, live, q_row_stride, q_head_stride, HEAD_DIM, HEAD_PAD, UPCAST
        )
        slope = tl.load(slopes + head, mask=live, other=0.0) if HAS_SLOPES else head
        position = kv_len - 1 + tl.zeros([BLOCK_M], tl.int32)
        table = block_tables + seq.to(tl.int64) * table_stride
        peak, total, sums = attend_keys(
            queries, position, slope, peak, total, sums, k_pool, v_pool, k_scales, v_scales, table,
            kv_head, num_kv_heads, start, stop, scale, soft_cap, window, HEAD_DIM, HEAD_PAD,
            BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, QUANTISED, UPCAST, MASKED=True,
        )  # fmt: skip
    if slot < 0:
        result = finish(peak, total, sums, sinks, head, live, HAS_SINKS)
        store_result(out, row, head, live, result, num_heads, HEAD_DIM, HEAD_PAD)
    else:
        slots = slot + tl.zeros([BLOCK_M], tl.int32)
        store_partial(part_sums, part_peaks, part_totals, slots, head, live, peak, total, sums,
                      num_heads, HEAD_DIM, HEAD_PAD)  # fmt: skip


def decode(
    call: Call,
    work: torch.Tensor,
    partials: Partials,
    out: torch.Tensor,
    launch: Launch,
    split: int,
) -> None:
    """Attend the one query of each listed sequence to ``split`` of its keys a program.

    work      int32 [n, 3] a program: sequence, first key (a multiple of split), slot or -1
    partials  filled at the slots named; sinks are left to the merge
    out       [T, num_q_heads, head_dim] of q's type, contiguous, filled where the slot is -1
    split     a multiple of launch.tile
    """
    _decode_kernel[(len(work) * call.num_kv_heads,)](
        out=out,
        part_sums=partials.sums,
        part_peaks=partials.peaks,
        part_totals=partials.totals,
        work=work,
        cu_seqlens_q=call.plan.cu_seqlens_q,
        kv_lens=call.plan.kv_lens,
        SPLIT=split,
        **call.arguments(launch),
    )
