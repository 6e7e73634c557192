"""Says which argument of a kernel is wrong, what was wanted and what was given."""

from typing import Any

import torch


def expect(holds: bool, name: str, wanted: str, given: Any) -> None:
    """Raise ValueError naming the argument unless ``holds``.

    A tensor is described by its shape, dtype and device; its values are never read, since on a
    GPU that would synchronise.
    """
    if holds:
        return
    shape = getattr(given, "shape", None)
    got = given if shape is None else f"{tuple(shape)} {given.dtype} on {given.device}"
    raise ValueError(f"{name} must be {wanted}, got {got}")


def expect_inside(name: str, ids: torch.Tensor, stop: int) -> None:
    """Raise IndexError unless every one of ``ids`` is in 0..stop-1; looks on the CPU only."""
    if ids.device.type == "cpu" and len(ids):
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= stop:
            raise IndexError(f"{name} must be in 0..{stop - 1}, got {low}..{high}")
