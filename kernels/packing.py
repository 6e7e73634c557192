"""Weights in the order in which the compiled product reads them; knows matrices, not models.

    weight [out, in] -> panels of PANEL output features: float32 [panels, in, PANEL], or bfloat16
    [panels, in / 2, PANEL, 2], whose pairs of inputs become two vectors by a shift and a mask

A float32 matrix whose every value is a bfloat16 is kept as one: the same numbers, half the bytes.
"""

import contextlib
import ctypes
import functools
import mmap
from dataclasses import dataclass, field

import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.native import load_library

_FLOAT32, _BFLOAT16 = 0, 1
_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64


class PackedStruct(ctypes.Structure):
    """What csrc/gemm.h calls Packed."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "type")),
    ]


class _Packing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "to")),
        *((name, ctypes.c_int64) for name in ("out", "given", "padded", "type", "stored")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "out_stride")),
        *((name, ctypes.c_void_p) for name in ("plus", "has_plus")),
    ]


@functools.cache
def panel_width() -> int:
    """Output features that the compiled product computes side by side; two vectors."""
    return int(load_library().radixkv_panel_width())


class Arena:
    """Memory for weights in huge pages where the system has them: a third faster to stream."""

    def __init__(self) -> None:
        self._free: torch.Tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return ``num_bytes`` of zeroed memory, aligned for any vector; lives with its users."""
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._free):
            region = mmap.mmap(-1, max(num_bytes, _ARENA_BYTES))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    region.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(region, dtype=torch.uint8)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A packed weight [out_features, in_features], each padded to what the product wants."""

    data: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    stored: torch.dtype
    struct: PackedStruct = field(repr=False)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; x [rows, in_features] float32, rows dense.

        The bits of a row do not depend on the other rows.
        """
        expect(x.dim() == 2 and x.shape[1] == self.in_features, "x", f"[*, {self.in_features}]", x)
        expect(x.dtype == torch.float32 and x.stride(1) == 1, "x", "float32 and dense", x)
        out = torch.empty(len(x), self.out_features)
        rows = _Rows(x.data_ptr(), out.data_ptr(), len(x), x.stride(0), self.out_features)
        load_library().radixkv_multiply(
            ctypes.byref(self.struct),
            ctypes.byref(rows),
            ctypes.c_int64(0),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return out


@torch.inference_mode()
def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    arena: Arena | None = None,
    in_features: int | None = None,
) -> PackedLinear:
    """Pack ``weight`` [out, in] on the CPU, float32 or bfloat16; the original is not kept.

    ``in_features`` pads the inputs with zeros up to so many.
    """
    expect(weight.dim() == 2 and weight.device.type == "cpu", "weight", "2-d, on the CPU", weight)
    known = weight.dtype in (torch.float32, torch.bfloat16)
    expect(known, "weight", "float32 or bfloat16", weight.dtype)
    weight = weight.contiguous()
    out, given = weight.shape
    padded, width = in_features or given, panel_width()
    expect(padded >= given, "in_features", f"at least {given}", padded)
    panels = -(-out // width)
    stored = _stored_type(weight, padded)
    num_bytes = panels * padded * width * stored.itemsize
    if arena is None:
        room = torch.zeros(num_bytes, dtype=torch.uint8).view(stored)
    else:
        room = arena.take(num_bytes)[:num_bytes].view(stored)
    source = _FLOAT32 if weight.dtype == torch.float32 else _BFLOAT16
    code = _FLOAT32 if stored == torch.float32 else _BFLOAT16
    packing = _Packing(weight.data_ptr(), room.data_ptr(), out, given, padded, source, code)
    library, threads = load_library(), ctypes.c_int64(torch.get_num_threads())
    library.radixkv_pack(ctypes.byref(packing), threads)
    kept = None if bias is None else bias.float().contiguous()
    pointer = None if kept is None else kept.data_ptr()
    struct = PackedStruct(room.data_ptr(), pointer, padded, out, code)
    return PackedLinear(room, kept, padded, out, stored, struct)


def pack_gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    arena: Arena | None = None,
) -> PackedLinear:
    """Pack two weights [features, in] panel by panel in turn, for ``silu(gate) * up`` in one go.

    ``features`` is padded with zeros to whole panels, and what comes of those is 0.
    """
    expect(gate.shape == up.shape and gate.dtype == up.dtype, "up", "like gate", up)
    both = _alternate(gate, up)
    if biases is None:
        return pack(both, arena=arena)
    bias = _alternate(biases[0].unsqueeze(1), biases[1].unsqueeze(1)).squeeze(1)
    return pack(both, bias, arena=arena)


def _alternate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    width = panel_width()
    missing = -len(a) % width
    parts = [torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (a, b)]
    panels = [part.view(-1, width, part.shape[1]) for part in parts]
    return torch.stack(panels, dim=1).view(-1, a.shape[1])


def _stored_type(weight: torch.Tensor, in_features: int) -> torch.dtype:
    if in_features % 2:
        return torch.float32
    if weight.dtype == torch.bfloat16:
        return torch.bfloat16
    wide = load_library().radixkv_needs_float32(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int64(weight.numel()),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return torch.float32 if wide else torch.bfloat16
