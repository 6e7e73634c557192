"""The sizes with which the Triton attention kernel is launched; no triton in here.

Every launch comes from ``choose_launch``, so compiling its range ahead of time covers what can
happen.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: sizes of the tiles, and the compiler's options."""

    head_dim: int
    head_pad: int
    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def choose_launch(dtype: torch.dtype, head_dim: int, group: int, decode: bool) -> Launch:
    """Choose sizes for sequences with one new token (decode) or several.

    Bounded by 64 KiB of shared memory (gfx942) and by registers: each of these compiles for sm_80,
    sm_90 and gfx942 without spilling, all features on. float32 has no tensor cores to feed, so its
    tiles are small.
    """
    head_pad = max(16, _power_of_two(head_dim))
    rows = max(16, _power_of_two(group))
    wide = head_pad > 128
    if dtype == torch.float32:
        warps = 8 if wide and not decode else 4
        return Launch(head_dim, head_pad, rows if decode else max(rows, 32), 16, warps, 2)
    if decode:
        return Launch(head_dim, head_pad, rows, 32 if wide else 64, 4, 2)
    if wide:
        return Launch(head_dim, head_pad, max(rows, 64), 16, 4, 2)
    return Launch(head_dim, head_pad, max(rows, 128), 64 if head_pad <= 64 else 32, 8, 2)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
