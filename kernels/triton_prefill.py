"""Attention of many new tokens a sequence: ragged, causal, over a cached prefix and themselves.

Imported only where triton is installed. A program attends BLOCK_M // GROUP queries with all heads
of a group, in one product. Reference: ``reference.paged_attention_reference``.
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
def _prefill_kernel(
    q,  # [T, num_q_heads, head_dim]
    k_pool,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_pool,
    k_scales,  # [num_blocks, block_size, num_kv_heads]
    v_scales,
    out,  # [T, num_q_heads, head_dim] contiguous
    part_sums,
    part_peaks,
    part_totals,
    work,  # [n, 5] sequence, first query, first key, slot of the first query or -1, parts
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    QUANTISED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    line = work + tl.program_id(0) // num_kv_heads * 5
    kv_head = tl.program_id(0) % num_kv_heads
    seq, first, start = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    first_slot, parts = tl.load(line + 3), tl.load(line + 4)
    row_start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row_start
    cached = tl.load(kv_lens + seq) - query_len

    m = tl.arange(0, BLOCK_M)
    nth = first + m // GROUP  # query of the sequence
    live = (m < BLOCK_Q * GROUP) & (nth < query_len)
    head = kv_head * GROUP + m % GROUP
    row = row_start + nth
    queries = load_queries(
        q, row, head, live, q_row_stride, q_head_stride, HEAD_DIM, HEAD_PAD, UPCAST
    )
    slope = tl.load(slopes + head, mask=live, other=0.0) if HAS_SLOPES else head
    position = cached + nth
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride

    # Only tiles that some query of this program sees are visited, and only those that not every
    # query sees whole pay for a mask.
    stop = cached + tl.minimum(first + BLOCK_Q, query_len)
    if HAS_WINDOW:
        start = tl.maximum(start, cached + first - window + 1)
    else:
        whole = tl.maximum(start, (cached + first + 1) // TILE * TILE)
        peak, total, sums = attend_keys(
            queries, position, slope, peak, total, sums, k_pool, v_pool, k_scales, v_scales, table,
            kv_head, num_kv_heads, start, whole, scale, soft_cap, window, HEAD_DIM, HEAD_PAD,
            BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, QUANTISED, UPCAST, MASKED=False,
        )  # fmt: skip
        start = whole
    peak, total, sums = attend_keys(
        queries, position, slope, peak, total, sums, k_pool, v_pool, k_scales, v_scales, table,
        kv_head, num_kv_heads, start, stop, scale, soft_cap, window, HEAD_DIM, HEAD_PAD,
        BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, QUANTISED, UPCAST, MASKED=True,
    )  # fmt: skip

    num_heads = num_kv_heads * GROUP
    if first_slot < 0:
        result = finish(peak, total, sums, sinks, head, live, HAS_SINKS)
        store_result(out, row, head, live, result, num_heads, HEAD_DIM, HEAD_PAD)
    else:
        slot = first_slot + m // GROUP * parts
        store_partial(part_sums, part_peaks, part_totals, slot, head, live, peak, total, sums,
                      num_heads, HEAD_DIM, HEAD_PAD)  # fmt: skip


def prefill(
    call: Call, work: torch.Tensor, partials: Partials, out: torch.Tensor, launch: Launch
) -> None:
    """Attend the queries that ``work`` lists to their sequences' keys, each up to its own position.

    work      int32 [n, 5] a program: sequence, first of launch.block_m // group queries, first key
              (a multiple of launch.tile), slot of that first query or -1, slots between queries
    partials  filled at the slots named; sinks are left to the merge
    out       [T, num_q_heads, head_dim] of q's type, contiguous, filled where the slot is -1
    """
    _prefill_kernel[(len(work) * call.num_kv_heads,)](
        out=out,
        part_sums=partials.sums,
        part_peaks=partials.peaks,
        part_totals=partials.totals,
        work=work,
        cu_seqlens_q=call.plan.cu_seqlens_q,
        kv_lens=call.plan.kv_lens,
        **call.arguments(launch),
    )
