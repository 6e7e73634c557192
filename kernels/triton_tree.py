"""Attention to keys that several sequences share: each piece of a run is read once for all of them.

Imported only where triton is installed. A program stacks the queries of many sequences, with all
heads of a group, into the rows of one product. Its results are parts that the merge combines with
those of deeper runs and of each sequence's own rest. Reference:
``reference.paged_attention_reference``, which knows nothing of sharing.
"""

import torch
import triton
import triton.language as tl

from radixkv.kernels.triton_call import Call, Partials
from radixkv.kernels.triton_config import Launch
from radixkv.kernels.triton_tiles import attend_keys, load_queries, store_partial


@triton.jit(do_not_specialize=["table_stride", "window"])
def _tree_kernel(
    q,  # [T, num_q_heads, head_dim]
    k_pool,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_pool,
    k_scales,  # [num_blocks, block_size, num_kv_heads]
    v_scales,
    part_sums,
    part_peaks,
    part_totals,
    work,  # [n, 6] sequence with the blocks, keys start, stop, queries first, last, piece
    run_queries,  # [m, 2] row of q, its slot for piece 0
    positions,  # [T] of the rows of q
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
    line = work + tl.program_id(0) // num_kv_heads * 6
    kv_head = tl.program_id(0) % num_kv_heads
    seq, start, stop = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    first, last, piece = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)

    m = tl.arange(0, BLOCK_M)
    nth = first + m // GROUP
    live = (m < BLOCK_Q * GROUP) & (nth < last)
    head = kv_head * GROUP + m % GROUP
    row = tl.load(run_queries + nth * 2, mask=live, other=0)
    slot = tl.load(run_queries + nth * 2 + 1, mask=live, other=0) + piece
    queries = load_queries(
        q, row, head, live, q_row_stride, q_head_stride, HEAD_DIM, HEAD_PAD, UPCAST
    )
    slope = tl.load(slopes + head, mask=live, other=0.0) if HAS_SLOPES else head
    position = tl.load(positions + row, mask=live, other=0).to(tl.int32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    # All queries stand behind the run, so that nothing but a window hides a key.
    if HAS_WINDOW:
        nearest = tl.min(tl.where(live, position, 2147483647), 0)
        start = tl.maximum(start, nearest - window + 1)
    peak, total, sums = attend_keys(
        queries, position, slope, peak, total, sums, k_pool, v_pool, k_scales, v_scales, table,
        kv_head, num_kv_heads, start, stop, scale, soft_cap, window, HEAD_DIM, HEAD_PAD,
        BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, QUANTISED, UPCAST,
        MASKED=HAS_WINDOW,
    )  # fmt: skip
    store_partial(part_sums, part_peaks, part_totals, slot, head, live, peak, total, sums,
                  num_kv_heads * GROUP, HEAD_DIM, HEAD_PAD)  # fmt: skip


def attend_runs(
    call: Call, work: torch.Tensor, run_queries: torch.Tensor, partials: Partials, launch: Launch
) -> None:
    """Attend stacks of queries to pieces of the runs that they share.

    work         int32 [n, 6] a program: a sequence whose table names the blocks, keys start and
                 stop (multiples of launch.tile, before all the queries), first and last + 1 of at
                 most launch.block_m // group lines of run_queries, number of the piece in its run
    run_queries  int32 [m, 2] row of q, its slot for piece 0; pieces follow each other
    partials     filled at those slots; sinks are left to the merge
    """
    _tree_kernel[(len(work) * call.num_kv_heads,)](
        part_sums=partials.sums,
        part_peaks=partials.peaks,
        part_totals=partials.totals,
        work=work,
        run_queries=run_queries,
        positions=call.plan.positions,
        **call.arguments(launch),
    )
