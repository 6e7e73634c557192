"""Combines partial softmaxes over stretches of keys into the attention over all of them.

Imported only where triton is installed. Knows slots, nothing of sequences or keys. Reference:
``merge_reference``.
"""

import torch
import triton
import triton.language as tl

from radixkv.kernels.features import Features
from radixkv.kernels.triton_call import Partials
from radixkv.kernels.triton_tiles import finish, store_result

PARTS = 16  # merged at a time
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit
def _merge_kernel(
    part_sums,  # [slots, num_q_heads, head_dim]
    part_peaks,  # [slots, num_q_heads]
    part_totals,
    out,  # [T, num_q_heads, head_dim] contiguous
    work,  # [n, 3] row, first slot, parts
    sinks,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    line = work + tl.program_id(0) // num_heads * 3
    head = tl.program_id(0) % num_heads
    row, first, parts = tl.load(line), tl.load(line + 1).to(tl.int64), tl.load(line + 2)
    d = tl.arange(0, HEAD_PAD)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, HEAD_PAD], tl.float32)
    for nth in range(0, parts, PARTS):
        p = nth + tl.arange(0, PARTS)
        at = (first + p) * num_heads + head
        peaks = tl.load(part_peaks + at, mask=p < parts, other=float("-inf"))
        # What lies where no key was seen is undefined, and must not count even x 0.
        seen = peaks > float("-inf")
        totals = tl.load(part_totals + at, mask=seen, other=0.0)
        mask = seen[:, None] & (d < HEAD_DIM)[None, :]
        pieces = tl.load(part_sums + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peaks - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights * totals, 0)
        sums = sums * shrink[:, None] + tl.sum(weights[:, None] * pieces, 0)[None, :]
        peak = higher
    heads = head + tl.zeros([1], tl.int32)
    live = heads >= 0
    result = finish(peak, total, sums, sinks, heads, live, HAS_SINKS)
    store_result(out, row + heads * 0, heads, live, result, num_heads, HEAD_DIM, HEAD_PAD)


def merge(work: torch.Tensor, partials: Partials, features: Features, out: torch.Tensor) -> None:
    """Fill rows of ``out`` with what their parts give together, sinks included.

    work      int32 [n, 3] row of out, its first slot, number of slots; slots follow each other in
              order of position, which fixes the order of the sums
    partials  at the slots named; all float32
    out       [T, num_q_heads, head_dim] contiguous, any float type. A row that saw no key gives 0

    Moves 4 * head_dim bytes a part and head. Reference: ``merge_reference``.
    """
    num_heads, head_dim = out.shape[1:]
    sinks = features.sinks
    _merge_kernel[(len(work) * num_heads,)](
        partials.sums,
        partials.peaks,
        partials.totals,
        out,
        work,
        partials.peaks if sinks is None else sinks.float().contiguous(),
        num_heads,
        **merge_constants(head_dim, sinks is not None),
        **OPTIONS,
    )


def merge_constants(head_dim: int, has_sinks: bool) -> dict[str, int]:
    """Name the values that the kernel is compiled for."""
    pad = max(16, triton.next_power_of_2(head_dim))
    return {"HEAD_DIM": head_dim, "HEAD_PAD": pad, "PARTS": PARTS, "HAS_SINKS": has_sinks}


def merge_reference(
    work: torch.Tensor, partials: Partials, features: Features, out: torch.Tensor
) -> None:
    """Do as ``merge`` says in float64, a row at a time."""
    for row, first, parts in work.tolist():
        peaks, totals, sums = (
            x[first : first + parts].double()
            for x in (partials.peaks, partials.totals, partials.sums)
        )
        weights = torch.where(peaks > -torch.inf, torch.exp2(peaks), 0.0)
        total = (weights * totals).sum(0)
        if features.sinks is not None:
            total += features.sinks.double().exp()
        seen = (weights > 0)[..., None]
        result = torch.where(seen, weights[..., None] * sums, 0.0).sum(0)
        result = result / torch.where(total > 0, total, 1.0)[:, None]
        out[row] = result.to(out.dtype)
