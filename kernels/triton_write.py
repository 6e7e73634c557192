"""Writes keys and values to slots on GPUs, quantising where the pool is; knows strides and slots.

Imported only where triton is installed. Reference: ``write.write_torch``, whose bits it gives.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv.kernels.checks import expect
from radixkv.kernels.quant import stored
from radixkv.kernels.triton_quant import quantise_rows

ELEMENTS = 2048  # of k that one program writes, and as many of v
NUM_WARPS = 4


@triton.jit
def _write_kernel(
    k,  # [T, num_heads, HEAD_DIM], the last dimension dense
    v,
    k_pool,  # [num_slots, num_heads, HEAD_DIM] contiguous
    v_pool,
    k_scales,  # [num_slots, num_heads]
    v_scales,
    slots,  # [T]
    num_rows,  # T * num_heads
    num_heads,
    num_slots,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    ROWS: tl.constexpr,  # head vectors of one program
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // num_heads, row % num_heads
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    to = slot * num_heads + head
    _write_rows(k + token * k_row_stride + head * k_head_stride, k_pool, k_scales, to, live,
                HEAD_DIM, HEAD_PAD)  # fmt: skip
    _write_rows(v + token * v_row_stride + head * v_head_stride, v_pool, v_scales, to, live,
                HEAD_DIM, HEAD_PAD)  # fmt: skip


@triton.jit
def _write_rows(rows, pool, scales, to, live, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    d = tl.arange(0, HEAD_PAD)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)
    element: tl.constexpr = pool.dtype.element_ty
    if element == tl.int8 or element == tl.uint8:
        codes, scale = quantise_rows(x.to(tl.float32), element)
        tl.store(scales + to, scale, mask=live)
    else:
        codes = x.to(element)
    tl.store(pool + to[:, None] * HEAD_DIM + d[None, :], codes, mask=mask)


def write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Write as ``write_kv`` says; one launch, without synchronisation.

    Tokens whose slot is outside the pool are dropped.
    """
    interpreted = bool(triton.knobs.runtime.interpret)
    expect(k.is_cuda or interpreted, "k", "on a GPU (or run with TRITON_INTERPRET=1)", k)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    num_heads, head_dim = k.shape[1:]
    num_rows = len(k) * num_heads
    if not num_rows:
        return
    fixed = constants(head_dim)
    _write_kernel[(triton.cdiv(num_rows, fixed["ROWS"]),)](
        k,
        v,
        stored(k_pool_layer),
        stored(v_pool_layer),
        # An unused pointer is never written: any tensor will do.
        k_pool_layer if k_scales is None else k_scales,
        v_pool_layer if v_scales is None else v_scales,
        slots,
        num_rows,
        num_heads,
        k_pool_layer.shape[0] * k_pool_layer.shape[1],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        **fixed,
        **options(),
    )


def constants(head_dim: int) -> dict[str, Any]:
    """Name the values that the kernel is compiled for."""
    head_pad = triton.next_power_of_2(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "ROWS": max(1, ELEMENTS // head_pad),
    }


def options() -> dict[str, Any]:
    """Name the compiler's options; fused operations would round other than the reference does."""
    return {"num_warps": NUM_WARPS, "num_stages": 1, "enable_fp_fusion": False}
