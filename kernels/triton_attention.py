"""Paged attention on GPUs: one Triton kernel for ragged prefill over a cached prefix and decode.

Imported only where triton is installed. Knows plans and strides; the launch sizes are in
``triton_config``. Reference: ``reference.paged_attention_reference``.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import expect
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.triton_config import Launch, choose_launch


@triton.jit
def _paged_attention_kernel(
    q,  # [T, num_q_heads, head_dim]
    k_pool,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_pool,
    out,  # [T, num_q_heads, head_dim] contiguous
    work,  # int32 [programs, 2]: sequence, first of its queries
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
    HEAD_PAD: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the product: BLOCK_M // GROUP queries x GROUP heads
    TILE: tl.constexpr,  # keys per step, whatever the block size
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies bfloat16 wrongly
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    program, kv_head = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(work + program * 2), tl.load(work + program * 2 + 1)
    row_start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - row_start
    kv_len = tl.load(kv_lens + seq)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PAD)
    nth = first + m // GROUP  # query of the sequence
    live_row = (m < BLOCK_Q * GROUP) & (nth < query_len)
    position = kv_len - query_len + nth
    head = kv_head * GROUP + m % GROUP
    row = (row_start + nth).to(tl.int64)
    live_q = live_row[:, None] & (d < HEAD_DIM)[None, :]
    q_at = row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :]
    queries = tl.load(q + q_at, mask=live_q, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=live_row, other=0.0)
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=live_row, other=0.0) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

    # Only tiles that some query of this program sees are visited.
    stop = kv_len - query_len + tl.minimum(first + BLOCK_Q, query_len)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(kv_len - query_len + first - window + 1, 0)
    for tile in range(start // TILE * TILE, stop, TILE):
        t = tile + tl.arange(0, TILE)
        # A masked value is loaded as 0: whatever lies there must not reach the product, even x 0.
        live_key = (t >= start) & (t < stop)
        table = block_tables + seq.to(tl.int64) * table_stride
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + tile % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            block = tl.load(table + t // BLOCK_SIZE, mask=live_key, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + t % BLOCK_SIZE
        at = (slot * num_kv_heads + kv_head) * HEAD_DIM
        k_mask = (d < HEAD_DIM)[:, None] & live_key[None, :]
        keys = tl.load(k_pool + at[None, :] + d[:, None], mask=k_mask, other=0.0)
        v_mask = live_key[:, None] & (d < HEAD_DIM)[None, :]
        values = tl.load(v_pool + at[:, None] + d[None, :], mask=v_mask, other=0.0)
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)

        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        distance = position[:, None] - t[None, :]
        if HAS_SLOPES:
            scores -= slope[:, None] * distance
        visible = (distance >= 0) & live_key[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet keeps its peak at -inf; -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        peak = higher

    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (row[:, None] * num_kv_heads * GROUP + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=live_q)


def paged_attention_triton(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says; at most two launches, without synchronisation.

    q and the pool have one dtype: float32, bfloat16 or float16. Softmax and sums in float32.
    """
    interpreted = bool(triton.knobs.runtime.interpret)
    expect(q.is_cuda or interpreted, "q", "on a GPU (or run with TRITON_INTERPRET=1)", q)
    expect(q.dtype == k_pool_layer.dtype, "q", f"of the pool's {k_pool_layer.dtype}", q)
    if q.stride(2) != 1:
        q = q.contiguous()
    group = q.shape[1] // k_pool_layer.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for decode, seqs in ((True, plan.decode_seqs), (False, plan.prefill_seqs)):
        if len(seqs):
            launch = choose_launch(q.dtype, q.shape[2], group, decode)
            work = _work(plan, decode, launch.block_m // group)
            _launch(launch, work, q, k_pool_layer, v_pool_layer, plan, features, out, interpreted)
    return out


def _launch(
    launch: Launch,
    work: torch.Tensor,
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    out: torch.Tensor,
    upcast: bool,
) -> None:
    num_kv_heads = k_pool_layer.shape[2]
    group = q.shape[1] // num_kv_heads
    _paged_attention_kernel[(len(work), num_kv_heads)](
        q,
        k_pool_layer,
        v_pool_layer,
        out,
        work,
        plan.cu_seqlens_q,
        plan.kv_lens,
        plan.block_tables,
        # An unused pointer is never read: any tensor will do.
        q if features.sinks is None else features.sinks.float().contiguous(),
        q if features.alibi_slopes is None else features.alibi_slopes.float().contiguous(),
        features.scale,
        features.soft_cap or 1.0,
        features.sliding_window or 0,
        plan.block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        num_kv_heads,
        **constants(launch, group, plan.block_size, features, upcast=upcast),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def constants(
    launch: Launch, group: int, block_size: int, features: Features, *, upcast: bool = False
) -> dict[str, Any]:
    """Name the values that the kernel is compiled for."""
    return {
        "GROUP": group,
        "HEAD_DIM": launch.head_dim,
        "HEAD_PAD": launch.head_pad,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.block_m,
        "TILE": launch.tile,
        "HAS_WINDOW": features.sliding_window is not None,
        "HAS_SOFT_CAP": features.soft_cap is not None,
        "HAS_SINKS": features.sinks is not None,
        "HAS_SLOPES": features.alibi_slopes is not None,
        "UPCAST": upcast,
    }


def _work(plan: AttentionPlan, decode: bool, block_q: int) -> torch.Tensor:
    """List what each program attends: int32 [programs, 2] of sequence, first query."""

    def make() -> torch.Tensor:
        seqs = plan.decode_seqs if decode else plan.prefill_seqs
        counts = -(-plan.host_query_lens[seqs].astype(np.int64) // block_q)
        ends = np.cumsum(counts)
        which = np.repeat(np.arange(len(seqs)), counts)
        first = (np.arange(ends[-1]) - (ends - counts)[which]) * block_q
        # Programs start in order, so the longest go first and none of them ends alone.
        length = (plan.host_kv_lens - plan.host_query_lens)[seqs[which]] + first
        order = np.argsort(-length, kind="stable")
        work = np.stack([seqs[which], first], axis=1)[order].astype(np.int32)
        return torch.from_numpy(work).to(plan.device, non_blocking=True)

    return plan.once(("triton work", decode, block_q), make)
