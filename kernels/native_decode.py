"""Calls the compiled decode kernel: one call a layer for all sequences with one new token.

Knows how a plan becomes the kernel's work units and how tensors become pointers.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.features import Features
from radixkv.kernels.native import load_library
from radixkv.kernels.plan import AttentionPlan

UNIT_TOKENS = 256
"""Tokens of one work unit. Fixed, so that a row's sums are grouped the same way in every batch."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANES = 16  # head_dim must be a multiple of the widest vector

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_seqs", "num_units", "num_q_heads", "num_kv_heads")),
        *((name, _INT) for name in ("head_dim", "block_size", "table_width", "type")),
        *((name, _INT) for name in ("num_threads", "window")),
        *((name, _POINTER) for name in ("tables", "rows", "lengths", "unit_seq")),
        *((name, _POINTER) for name in ("unit_start", "unit_stop", "first_unit")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "v", "out", "partial", "sinks", "slopes")),
        *((name, _INT) for name in ("q_row_stride", "q_head_stride")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A step in the kernel's terms, and the memory its pointers point to."""

    step: _Step
    partial: torch.Tensor
    keeps: tuple[npt.NDArray[np.int64] | npt.NDArray[np.int32], ...]


def supports(q: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether the kernel knows these types and shapes."""
    return q.dtype == pool.dtype and q.dtype in TYPES and q.shape[2] % LANES == 0


def decode_native(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    out: torch.Tensor,
) -> None:
    """Fill the rows of ``out`` that belong to ``plan.decode_seqs``; shapes as ``paged_attention``.

    Reads every visible key and value once; softmax and sums in float32. Uses as many threads as
    torch does. ``out`` is contiguous.
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    shape = (q.dtype, q.shape[1], k_pool_layer.shape[2], q.shape[2], features.sliding_window)
    ready = plan.once(("native", *shape), lambda: _prepare(plan, q, k_pool_layer, features))
    ready.step.num_threads = min(torch.get_num_threads(), ready.step.num_units)
    sinks = None if features.sinks is None else features.sinks.float().contiguous()
    slopes = None if features.alibi_slopes is None else features.alibi_slopes.float().contiguous()
    layer = _Layer(
        q.data_ptr(),
        k_pool_layer.data_ptr(),
        v_pool_layer.data_ptr(),
        out.data_ptr(),
        ready.partial.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if slopes is None else slopes.data_ptr(),
        q.stride(0),
        q.stride(1),
        features.scale,
        features.soft_cap or 0.0,
    )
    load_library().radixkv_decode(ctypes.byref(ready.step), ctypes.byref(layer))


def _prepare(
    plan: AttentionPlan, q: torch.Tensor, pool: torch.Tensor, features: Features
) -> _Prepared:
    seqs = plan.decode_seqs
    lengths = plan.host_kv_lens[seqs].astype(np.int64)
    first = np.zeros_like(lengths)
    if features.sliding_window is not None:
        first = np.maximum(0, lengths - features.sliding_window)
    counts = -(-(lengths - first) // UNIT_TOKENS)
    first_unit = np.concatenate([[0], np.cumsum(counts)])
    unit_seq = np.repeat(np.arange(len(seqs)), counts)
    nth = np.arange(first_unit[-1]) - first_unit[unit_seq]
    unit_start = first[unit_seq] + nth * UNIT_TOKENS
    unit_stop = np.minimum(unit_start + UNIT_TOKENS, lengths[unit_seq])
    tables = np.ascontiguousarray(plan.host_block_tables[seqs])
    rows = plan.host_cu_seqlens_q[seqs].astype(np.int64)
    keeps = (tables, rows, lengths, unit_seq, unit_start, unit_stop, first_unit)
    used = np.arange(tables.shape[1]) < -(-lengths // plan.block_size)[:, None]
    named = tables[used]
    if len(named) and (named.min() < 0 or named.max() >= len(pool)):
        raise IndexError(f"block_tables must name blocks in 0..{len(pool) - 1}")
    step = _Step(
        len(seqs),
        len(unit_seq),
        q.shape[1],
        pool.shape[2],
        q.shape[2],
        plan.block_size,
        tables.shape[1],
        TYPES[q.dtype],
        1,
        features.sliding_window or 0,
        *(array.ctypes.data for array in keeps),
    )
    partial = torch.empty(len(unit_seq), q.shape[1], q.shape[2] + 2, dtype=torch.float32)
    return _Prepared(step, partial, keeps)
