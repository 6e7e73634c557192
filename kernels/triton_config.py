"""The sizes with which the Triton attention kernels are launched; no triton in here.

Every launch comes from ``choose_launch``, so compiling its range ahead of time covers what can
happen.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

Family = Literal["prefill", "decode", "tree"]

ROOMY_BYTES = 200 << 10
"""Shared memory of a program from which on tiles are large. sm_90 and sm_100 have it, and multiply
from shared memory; sm_80 has 163 KiB, but multiplies from registers, which larger tiles exhaust."""

SMALL_BYTES = 64 << 10
"""What every GPU has, gfx942 and the small cards of each generation too."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: sizes of the tiles, and the compiler's options."""

    head_dim: int
    head_pad: int  # head_dim rounded up to a power of two
    block_m: int  # rows of a product: block_m // group queries x the heads of a group
    tile: int  # keys a step, whatever the block size
    num_warps: int
    num_stages: int


@functools.cache
def choose_launch(
    family: Family,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    quantised: bool,
    shared_bytes: int,
) -> Launch:
    """Choose sizes for queries of a dtype on a GPU that gives a program ``shared_bytes``.

    Bounded by shared memory and by registers: each of these compiles without spilling for sm_80,
    sm_90, sm_100 and gfx942, all features on, for groups of up to 32 heads; larger ones are right
    and may spill. float32 has no tensor cores to feed, so its tiles are small. A decoding sequence
    has no more rows than heads in a group, and waits for memory alone.
    """
    head_pad = max(16, _power_of_two(head_dim))
    rows = max(16, _power_of_two(group))
    wide = head_pad > 128
    if dtype == torch.float32:
        few = family == "decode"
        warps = 8 if head_pad > 64 or rows > 32 else 4
        stages = 1 if wide and quantised and family == "tree" else 2
        return Launch(head_dim, head_pad, rows if few else max(rows, 32), 16, warps, stages)
    # Of three stages one looks up where the keys of the next lie.
    roomy = shared_bytes >= ROOMY_BYTES
    if family == "decode":
        return Launch(head_dim, head_pad, rows, 32 if wide else 64, 4 if rows <= 32 else 8, 3)
    if wide:
        return Launch(head_dim, head_pad, max(rows, 64), 32 if roomy else 16, 8, 3)
    if family == "tree" or (quantised and not roomy):  # unpacking codes takes registers
        return Launch(head_dim, head_pad, max(rows, 64), 64 if roomy else 32, 4, 3)
    tile = 64 if roomy or head_pad <= 64 else 32
    return Launch(head_dim, head_pad, max(rows, 128), tile, 8, 3)


def split_tokens(group: int) -> int:
    """Keys of one program of a decoding sequence: by the model alone, so that a row's bits are.

    Few enough that one long sequence fills a GPU; so many that a partial result, written and read
    once in float32 for each head of the group, is a few percent of the keys that it stands for.
    """
    return max(256, 64 * _power_of_two(group))


def run_tokens(group: int) -> int:
    """Keys of one program of a shared run, at least; a multiple of ``split_tokens``."""
    return 2 * split_tokens(group)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take on a device; the least of all where it is unknown."""
    if device.type != "cuda" or torch.version.hip is not None:
        return SMALL_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", SMALL_BYTES))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
