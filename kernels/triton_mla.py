"""Latent attention on GPUs: keys are split at fixed positions, then the parts are merged.

Imported only where triton is installed. Knows plans and strides. Reference:
``mla.mla_attention_reference``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import expect
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.triton_config import shared_bytes
from radixkv.kernels.triton_write import ELEMENTS, _write_rows


@triton.jit
def _split_kernel(
    q_latent,  # [T, num_heads, RANK], the last dimension dense
    q_rope,  # [T, num_heads, ROPE], the last dimension dense
    pool,  # [num_slots, RANK + ROPE] contiguous
    parts,  # float32 [work, num_heads, RANK]: sums over the split's keys, normalised
    masses,  # float32 [work, num_heads]: log2 of the sum of their weights
    work,  # int32 [work, 4]: row of q, sequence, first key, one past the last
    block_tables,
    scale_log2,  # scale * log2(e)
    table_stride,
    latent_row_stride,
    latent_head_stride,
    rope_row_stride,
    rope_head_stride,
    num_heads,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads of a program: rows of the product
    TILE: tl.constexpr,  # keys per step
    UPCAST: tl.constexpr,  # the interpreter multiplies bfloat16 wrongly
):
    part = tl.program_id(0)
    row = tl.load(work + part * 4).to(tl.int64)
    seq = tl.load(work + part * 4 + 1).to(tl.int64)
    start, stop = tl.load(work + part * 4 + 2), tl.load(work + part * 4 + 3)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, r = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    live_head = head < num_heads
    latent_mask = live_head[:, None] & (c < RANK)[None, :]
    rope_mask = live_head[:, None] & (r < ROPE)[None, :]
    latent_at = row * latent_row_stride + head[:, None] * latent_head_stride + c[None, :]
    rope_at = row * rope_row_stride + head[:, None] * rope_head_stride + r[None, :]
    queries = tl.load(q_latent + latent_at, mask=latent_mask, other=0.0)
    turned = tl.load(q_rope + rope_at, mask=rope_mask, other=0.0)
    if UPCAST:
        queries, turned = queries.to(tl.float32), turned.to(tl.float32)

    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, RANK_PAD], tl.float32)
    for tile in range(start, stop, TILE):
        t = tile + tl.arange(0, TILE)
        # A masked key is loaded as 0: whatever lies there must not reach the product, even x 0.
        live = t < stop
        block = tl.load(block_tables + seq * table_stride + t // BLOCK_SIZE, mask=live, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + t % BLOCK_SIZE) * (RANK + ROPE)
        mask = live[:, None] & (c < RANK)[None, :]
        latents = tl.load(pool + at[:, None] + c[None, :], mask=mask, other=0.0)
        mask = live[None, :] & (r < ROPE)[:, None]
        ropes = tl.load(pool + at[None, :] + RANK + r[:, None], mask=mask, other=0.0)
        if UPCAST:
            latents, ropes = latents.to(tl.float32), ropes.to(tl.float32)
        scores = tl.dot(turned, ropes, input_precision="ieee")
        scores = tl.dot(queries, tl.trans(latents), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))  # a split has a key, so this is finite
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(latents.dtype), latents, sums, input_precision="ieee")
        peak = higher

    at = part.to(tl.int64) * num_heads + head
    tl.store(parts + at[:, None] * RANK + c[None, :], sums / total[:, None], mask=latent_mask)
    tl.store(masses + at, peak + tl.log2(total), mask=live_head)


@triton.jit
def _merge_kernel(
    parts,
    masses,
    out,  # [T, num_heads, RANK] contiguous
    ends,  # int32 [T + 1]: the parts of row t are ends[t] : ends[t + 1]
    num_heads,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, RANK_PAD)
    start, stop = tl.load(ends + row), tl.load(ends + row + 1)
    base = start.to(tl.int64) * num_heads + head
    peak = tl.load(masses + base)
    total = 0.0
    sums = tl.zeros([RANK_PAD], tl.float32)
    for nth in range(0, stop - start):
        at = base + nth * num_heads
        mass = tl.load(masses + at)
        higher = tl.maximum(peak, mass)
        shrink, weight = tl.exp2(peak - higher), tl.exp2(mass - higher)
        piece = tl.load(parts + at * RANK + c, mask=c < RANK, other=0.0)
        sums = sums * shrink + piece * weight
        total = total * shrink + weight
        peak = higher
    at = (row.to(tl.int64) * num_heads + head) * RANK
    tl.store(out + at + c, (sums / total).to(out.dtype.element_ty), mask=c < RANK)


@triton.jit
def _write_latents_kernel(
    latents,  # [T, WIDTH], the last dimension dense
    pool,  # [num_slots, WIDTH] contiguous
    slots,  # [T]
    num_rows,
    num_slots,
    row_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    _write_rows(latents + row * row_stride, pool, pool, slot, live, WIDTH, WIDTH_PAD)


@dataclass(frozen=True, slots=True)
class Launch:
    """Sizes of one launch of the split kernel, and the compiler's options."""

    block_h: int
    tile: int
    num_warps: int
    num_stages: int


def choose_launch(dtype: torch.dtype, num_heads: int, shared_bytes: int) -> Launch:
    """Choose sizes for a GPU that gives a program ``shared_bytes`` of shared memory.

    A tile of keys is read once for all heads of a program, so with room it takes more of them; 64
    would spill registers at rank 512.
    """
    if dtype == torch.float32:
        return Launch(16, 16, 4, 1)
    if num_heads > 16 and shared_bytes >= 96 << 10:
        return Launch(32, 32, 8, 2)
    return Launch(16, 32, 4, 2)


def split_tokens(num_heads: int) -> int:
    """Keys of a split: by the model alone, so that a row's bits are. Many heads fill a GPU."""
    return 1024 if num_heads > 32 else 512


def mla_attention_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Attend as ``mla_attention`` says; two launches, without synchronisation.

    Queries and pool have one dtype: float32, bfloat16 or float16. Takes a temporary of
    4 * num_heads * rank bytes a split.
    """
    interpreted = bool(triton.knobs.runtime.interpret)
    wanted = "on a GPU (or run with TRITON_INTERPRET=1)"
    expect(q_latent.is_cuda or interpreted, "q_latent", wanted, q_latent)
    expect(q_latent.dtype == pool_layer.dtype, "q_latent", f"of {pool_layer.dtype}", q_latent)
    q_latent, q_rope = (x if x.stride(2) == 1 else x.contiguous() for x in (q_latent, q_rope))
    num_rows, num_heads, rank = q_latent.shape
    device = q_latent.device
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=device)
    if not num_rows:
        return out
    work, ends = _work(plan, split_tokens(num_heads))
    parts = torch.empty((len(work), num_heads, rank), dtype=torch.float32, device=device)
    masses = torch.empty((len(work), num_heads), dtype=torch.float32, device=device)
    launch = choose_launch(q_latent.dtype, num_heads, shared_bytes(device))
    _split_kernel[(len(work), triton.cdiv(num_heads, launch.block_h))](
        q_latent,
        q_rope,
        pool_layer,
        parts,
        masses,
        work,
        plan.block_tables,
        scale * 1.4426950408889634,
        plan.block_tables.stride(0),
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        num_heads,
        **split_constants(launch, rank, q_rope.shape[2], plan.block_size, upcast=interpreted),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,
    )
    _merge_kernel[(num_rows, num_heads)](
        parts, masses, out, ends, num_heads, **merge_constants(rank), **OPTIONS
    )
    return out


def write_latents_triton(
    latents: torch.Tensor, pool_layer: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write as ``write_latents`` says; one launch. A slot outside the pool drops its token."""
    if latents.stride(1) != 1:
        latents = latents.contiguous()
    num_rows, width = latents.shape
    if num_rows:
        fixed = write_constants(width)
        num_slots = pool_layer.shape[0] * pool_layer.shape[1]
        _write_latents_kernel[(triton.cdiv(num_rows, fixed["ROWS"]),)](
            latents, pool_layer, slots, num_rows, num_slots, latents.stride(0), **fixed, **OPTIONS
        )


OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""The compiler's options for merging and writing."""


def split_constants(
    launch: Launch, rank: int, rope: int, block_size: int, *, upcast: bool = False
) -> dict[str, Any]:
    """Name the values that the split kernel is compiled for."""
    return {
        "RANK": rank,
        "ROPE": rope,
        "RANK_PAD": max(16, triton.next_power_of_2(rank)),
        "ROPE_PAD": max(16, triton.next_power_of_2(rope)),
        "BLOCK_SIZE": block_size,
        "BLOCK_H": launch.block_h,
        "TILE": launch.tile,
        "UPCAST": upcast,
    }


def merge_constants(rank: int) -> dict[str, Any]:
    """Name the values that the merge kernel is compiled for."""
    return {"RANK": rank, "RANK_PAD": triton.next_power_of_2(rank)}


def write_constants(width: int) -> dict[str, Any]:
    """Name the values that the write kernel is compiled for."""
    pad = triton.next_power_of_2(width)
    return {"WIDTH": width, "WIDTH_PAD": pad, "ROWS": max(1, ELEMENTS // pad)}


def _work(plan: AttentionPlan, split: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List the splits of each row: int32 [work, 4] and the ends of the rows in it [T + 1]."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        queries = plan.host_query_lens.astype(np.int64)
        seqs = np.repeat(np.arange(plan.num_seqs), queries)
        behind = plan.host_kv_lens - plan.host_cu_seqlens_q[1:]
        lengths = np.arange(plan.num_tokens) + behind[seqs] + 1  # keys that each row sees
        counts = -(-lengths // split)
        ends = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(np.arange(plan.num_tokens), counts)
        first = (np.arange(ends[-1]) - ends[rows]) * split
        last = np.minimum(first + split, lengths[rows])
        work = np.stack([rows, seqs[rows], first, last], axis=1).astype(np.int32)
        return tuple(  # type: ignore[return-value]
            torch.from_numpy(x.astype(np.int32)).to(plan.device, non_blocking=True)
            for x in (work, ends)
        )

    return plan.once(("mla work", split), make)
