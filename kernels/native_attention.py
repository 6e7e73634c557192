"""Calls the compiled attention kernel: one call a layer for all rows of a step.

Knows how tensors become pointers; what is read by whom is native_items' to say.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.kernels.features import Features
from radixkv.kernels.native import load_library
from radixkv.kernels.native_items import UNIT_TOKENS, Items
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel, shared_runs

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANES = 16  # head_dim must be a multiple of the widest vector
COST = CostModel(token=1.0, run=64.0, row=8.0)

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_parts", "num_finishes", "num_q_heads", "num_kv_heads")),
        *((name, _INT) for name in ("head_dim", "block_size", "table_width")),
        *((name, _INT) for name in ("q_type", "out_type", "pool_type", "window")),
        *((name, _INT) for name in ("num_threads", "scratch_floats", "max_rows")),
        *((name, _POINTER) for name in ("parts", "finishes", "tables", "rows", "positions")),
        *((name, _POINTER) for name in ("ref_start", "refs", "partials", "scratch")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "v", "out", "sinks", "slopes")),
        *((name, _INT) for name in ("q_row_stride", "q_head_stride")),
        *((name, _INT) for name in ("out_row_stride", "out_head_stride")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step in the kernel's terms: ``step`` is the address of a ``Step`` of csrc/attention.h.

    It lives as long as this object, and so does all memory that it points to. Its scratch memory
    serves one layer at a time.
    """

    step: int
    keeps: tuple[Any, ...]


def supports(q: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether the kernel knows these types and shapes."""
    return pool.dtype in TYPES and q.dtype in TYPES and q.shape[2] % LANES == 0


def attend_native(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    out: torch.Tensor,
) -> None:
    """Fill ``out``; shapes as ``paged_attention``. Softmax and sums in float32.

    The bits of a row depend on its own query, keys and position alone. Uses as many threads as
    torch does.
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    num_blocks, _, num_kv_heads, head_dim = k_pool_layer.shape
    ready = prepare(
        plan,
        q.shape[1],
        num_kv_heads,
        head_dim,
        q.dtype,
        k_pool_layer.dtype,
        features.sliding_window,
        num_blocks=num_blocks,
    )
    sinks = None if features.sinks is None else features.sinks.float().contiguous()
    slopes = None if features.alibi_slopes is None else features.alibi_slopes.float().contiguous()
    layer = _Layer(
        q.data_ptr(),
        k_pool_layer.data_ptr(),
        v_pool_layer.data_ptr(),
        out.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if slopes is None else slopes.data_ptr(),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        features.scale,
        features.soft_cap or 0.0,
    )
    load_library().radixkv_attend(ctypes.c_void_p(ready.step), ctypes.byref(layer))


def prepare(
    plan: AttentionPlan,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_dtype: torch.dtype,
    pool_dtype: torch.dtype,
    window: int | None = None,
    *,
    num_blocks: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Prepared:
    """Turn a plan into what ``radixkv_attend`` reads in every layer; kept with the plan.

    ``out_dtype`` is q's unless given. With ``num_blocks`` the tables are checked: IndexError names
    the sequence whose table points outside the pool.
    """
    threads = torch.get_num_threads()
    out_dtype = out_dtype or q_dtype
    shape = (num_q_heads, num_kv_heads, head_dim, window, threads)
    key = ("native", *shape, q_dtype, out_dtype, pool_dtype, num_blocks)

    def make() -> Prepared:
        if num_blocks is not None:
            _check_tables(plan, num_blocks)
        whole = window is None or window >= plan.max_kv_len
        runs = shared_runs(plan, UNIT_TOKENS, COST) if whole else None
        items = Items(plan, num_q_heads, num_kv_heads, None if whole else window, runs, threads)
        types = (TYPES[q_dtype], TYPES[out_dtype], TYPES[pool_dtype])
        return _prepared(items, head_dim, types)

    return plan.once(key, make)


def _check_tables(plan: AttentionPlan, num_blocks: int) -> None:
    tables = plan.host_block_tables
    bad = load_library().radixkv_check_tables(
        ctypes.c_void_p(tables.ctypes.data),
        _INT(tables.shape[1]),
        _INT(plan.block_size),
        ctypes.c_void_p(plan.host_kv_lens.ctypes.data),
        _INT(plan.num_seqs),
        _INT(num_blocks),
    )
    if bad >= 0:
        raise IndexError(f"block_tables[{bad}] must name blocks in 0..{num_blocks - 1}")


def _prepared(items: Items, head_dim: int, types: tuple[int, int, int]) -> Prepared:
    plan, tables = items.plan, items.plan.host_block_tables
    parts, rows = items.all_parts(), items.all_rows()
    ref_start, refs = items.all_refs()
    max_rows = items.max_rows(parts)
    threads = max(1, min(items.threads, max(len(parts), len(items.finishes))))
    library = load_library()
    scratch_floats = int(library.radixkv_attend_scratch(_INT(max_rows), _INT(head_dim)))
    partial_floats = items.num_partials * items.num_q_heads * (head_dim + 2)
    memory = torch.empty(threads * scratch_floats + partial_floats, dtype=torch.float32)
    step = _Step(
        len(parts),
        len(items.finishes),
        items.num_q_heads,
        items.num_kv_heads,
        head_dim,
        plan.block_size,
        tables.shape[1],
        *types,
        items.window or 0,
        threads,
        scratch_floats,
        max_rows,
        parts.ctypes.data,
        items.finishes.ctypes.data,
        tables.ctypes.data,
        rows.ctypes.data,
        plan.positions.data_ptr(),
        None if ref_start is None else ref_start.ctypes.data,
        None if refs is None else refs.ctypes.data,
        memory.data_ptr() + 4 * threads * scratch_floats,
        memory.data_ptr(),
    )
    keeps = (step, parts, items.finishes, tables, rows, plan.positions, ref_start, refs, memory)
    return Prepared(ctypes.addressof(step), keeps)
