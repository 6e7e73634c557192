"""Says which argument of a kernel is wrong, what was wanted and what was given."""

from typing import Any


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
