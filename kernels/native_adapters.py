"""Low-rank adapters as the compiled decoder wants them: packed factors, and whose rows are whose.

Knows matrices, layers and rows; nothing of where adapters come from or who asked for one.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.native import load_library
from radixkv.kernels.packing import Arena, PackedLinear, PackedStruct, pack

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that an adapter may add to, in the order of csrc/adapters.h."""

Factors = tuple[torch.Tensor, torch.Tensor]
"""a [rank, in] and b [out, rank], with the adapter's scale in b: it adds ``x @ a.T @ b.T``."""

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _LowRank(ctypes.Structure):
    _fields_ = [("a", PackedStruct), ("b", PackedStruct)]


class _AdapterLayer(ctypes.Structure):
    _fields_ = [("parts", _LowRank * len(PARTS))]


class _AdapterRun(ctypes.Structure):
    _fields_ = [("layers", _POINTER), ("first", _INT), ("rows", _INT)]


class AdaptedRowsStruct(ctypes.Structure):
    """What csrc/adapters.h calls AdaptedRows."""

    _fields_ = [("runs", _POINTER), ("num_runs", _INT), ("gated", _POINTER)]


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter:
    """The factors of one adapter, packed; lives as long as a step that uses it."""

    max_rank: int
    gated: bool
    """Whether it changes a gate or an up projection, which lie before the activation."""
    layers: "ctypes.Array[_AdapterLayer]" = field(repr=False)
    packed: list[PackedLinear] = field(repr=False)


class AdapterRun(NamedTuple):
    """Consecutive rows of a step that one adapter is applied to."""

    adapter: NativeAdapter
    start: int
    stop: int


def pack_adapter(layers: Sequence[Mapping[str, Factors]], *, padded_features: int) -> NativeAdapter:
    """Pack the factors of each layer by the name of the part they add to; float32 on the CPU.

    ``padded_features`` is the width of what the gated product stores: the model's
    ``down.in_features``.
    """
    arena, packed = Arena(), []
    found = (_AdapterLayer * len(layers))()
    max_rank = 1
    for to, parts in zip(found, layers, strict=True):
        for name, (a, b) in parts.items():
            expect(name in PARTS, "part", f"one of {', '.join(PARTS)}", name)
            expect(a.dim() == 2 and b.dim() == 2 and b.shape[1] == len(a), "b", "[out, rank]", b)
            wide = padded_features if name == "down_proj" else None
            if name in ("gate_proj", "up_proj"):  # every column of a delta must be written
                b = torch.nn.functional.pad(b, (0, 0, 0, padded_features - len(b)))
            low = pack(a.float(), arena=arena, in_features=wide)
            high = pack(b.float(), arena=arena)
            packed += [low, high]
            max_rank = max(max_rank, len(a))
            part = to.parts[PARTS.index(name)]
            part.a, part.b = low.struct, high.struct
    gated = any("gate_proj" in parts or "up_proj" in parts for parts in layers)
    return NativeAdapter(max_rank, gated, found, packed)


class AdaptedRows:
    """Which rows of a step are under which adapter: all of them, and those that get logits."""

    def __init__(self, runs: Sequence[AdapterRun], num_rows: int, logit_rows: torch.Tensor) -> None:
        self.max_rank = max((run.adapter.max_rank for run in runs), default=0)
        self.gated = any(run.adapter.gated for run in runs)
        self._keep: list[object] = [runs]
        if not runs:
            self.all = self.wanted = AdaptedRowsStruct()
            return
        owners = np.full(num_rows, -1, np.int32)
        for i, run in enumerate(runs):
            inside = 0 <= run.start < run.stop <= num_rows
            free = inside and bool((owners[run.start : run.stop] < 0).all())
            expect(free, "runs", "apart", run)
            owners[run.start : run.stop] = i
        self.all = self._struct(runs, owners)
        self.wanted = self._struct(runs, owners[logit_rows.numpy()])

    def scratch(self, num_threads: int) -> int:
        """Floats that the low products need."""
        return int(load_library().radixkv_adapter_scratch(_INT(self.max_rank), _INT(num_threads)))

    def _struct(self, runs: Sequence[AdapterRun], owners: np.ndarray) -> AdaptedRowsStruct:
        """Describe rows by the index of their run, -1 for none."""
        borders = np.flatnonzero(np.diff(owners, prepend=-2, append=-2))
        found = [
            (ctypes.addressof(runs[owners[start]].adapter.layers), int(start), int(stop - start))
            for start, stop in zip(borders[:-1], borders[1:], strict=True)
            if owners[start] >= 0
        ]
        array = (_AdapterRun * len(found))(*(_AdapterRun(*run) for run in found))
        self._keep.append(array)
        gated = None
        if self.gated:
            kinds = np.array([*(run.adapter.gated for run in runs), False], np.uint8)
            flags = kinds[owners]
            self._keep.append(flags)
            gated = flags.ctypes.data
        return AdaptedRowsStruct(ctypes.addressof(array), len(found), gated)
