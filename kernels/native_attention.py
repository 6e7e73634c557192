"""Calls the compiled attention kernel: one call a layer for all rows of a step.

Knows how a plan becomes the kernel's items and how tensors become pointers.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.features import Features
from radixkv.kernels.native import load_library
from radixkv.kernels.plan import AttentionPlan, Int32
from radixkv.kernels.tree import CostModel, SharedRuns, shared_runs

UNIT_TOKENS = 256
"""Tokens that get one partial result; the same in csrc/attention.h."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANES = 16  # head_dim must be a multiple of the widest vector
MAX_ROWS = 96  # rows of one item: its queries, scores and sums stay in a core's second cache
MIN_ROWS = 24  # ... unless that leaves threads idle; fewer rows would hardly share a tile
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
        items = _Items(plan, num_q_heads, num_kv_heads, None if whole else window, runs, threads)
        types = (TYPES[q_dtype], TYPES[out_dtype], TYPES[pool_dtype])
        return items.prepared(head_dim, types)

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


class _Items:
    """Cuts the rows and keys of a step into items, each for one thread at a time.

    Columns of an item as in csrc/attention.h: first, count, seq, head, head_stop, unit, unit_stop,
    opens, slot, stride.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        num_q_heads: int,
        num_kv_heads: int,
        window: int | None,
        runs: SharedRuns | None,
        threads: int,
    ) -> None:
        self.plan, self.window, self.runs, self.threads = plan, window, runs, threads
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.group = num_q_heads // num_kv_heads
        self.parts: list[npt.NDArray[np.integer[Any]]] = []
        self.rows = [np.arange(plan.num_tokens, dtype=np.int32)]
        self.refs: list[npt.NDArray[np.integer[Any]]] = []  # [n, 2]: row of q, partial
        self.num_partials = 0
        if runs is not None:
            for run in range(runs.num_runs):
                self._share(runs, run)
        finishes = [self._decode(), self._prefill()]
        self.finishes = _by_size(np.concatenate([f for f in finishes if f is not None] or [_NONE]))

    def _share(self, runs: SharedRuns, run: int) -> None:
        """Read one run for all rows of its members."""
        start, stop = int(runs.run_start[run]), int(runs.run_stop[run])
        members = runs.members(run)
        rows = _ranges(self.plan.host_cu_seqlens_q[members], self.plan.host_query_lens[members])
        unit, unit_stop = start // UNIT_TOKENS, stop // UNIT_TOKENS
        opens = start == 0
        count, units = len(rows), 1 if opens else unit_stop - unit
        chunk = self._chunk(count)
        first = np.arange(0, count, chunk)
        item = _table(len(first) * self.num_kv_heads)
        head = np.repeat(np.arange(self.num_kv_heads), len(first))
        first = np.tile(first, self.num_kv_heads)
        item[:, 0] = first + sum(map(len, self.rows))
        item[:, 1] = np.minimum(chunk, count - first)
        item[:, 2] = runs.run_seq[run]
        item[:, 3], item[:, 4] = head, head + 1
        item[:, 5], item[:, 6], item[:, 7] = unit, unit_stop, opens
        item[:, 8], item[:, 9] = self.num_partials + first, count
        self.parts.append(item)
        self.rows.append(rows)
        partials = self.num_partials + np.arange(units) * count + np.arange(count)[:, None]
        self.refs.append(np.stack([np.repeat(rows, units), partials.ravel()], axis=1))
        self.num_partials += units * count

    def _chunk(self, tokens: int) -> int:
        """Tokens of an item where ``tokens`` read the same keys: enough items for all threads."""
        most = max(1, MAX_ROWS // self.group)
        least = max(1, MIN_ROWS // self.group)
        wanted = -(-4 * self.threads // self.num_kv_heads) if self.threads > 1 else 1
        return min(most, max(least, -(-tokens // wanted)))

    def _decode(self) -> Int32 | None:
        """One item for each sequence with one new token, or several where threads would idle."""
        plan, seqs = self.plan, self.plan.decode_seqs
        if not len(seqs):
            return None
        lengths = plan.host_kv_lens[seqs]
        unit_stop = -(-lengths // UNIT_TOKENS)
        item = _table(len(seqs))
        item[:, 0], item[:, 1], item[:, 2] = plan.host_cu_seqlens_q[seqs], 1, seqs
        item[:, 4] = self.num_kv_heads
        if self.window is not None:
            item[:, 5] = np.maximum(0, lengths - self.window) // UNIT_TOKENS
        if self.runs is not None:
            item[:, 5] = self.runs.own_start[seqs] // UNIT_TOKENS
        item[:, 6] = unit_stop
        counts = item[:, 6] - item[:, 5]
        piece = max(1, -(-int(counts.sum()) // (4 * self.threads)))
        if self.threads > 1 and len(seqs) < 4 * self.threads and int(counts.max()) > piece:
            self._split(item, counts, piece)
        return item

    def _split(self, item: Int32, counts: Int32, piece: int) -> None:
        """Leave the long ones of ``item`` to pieces of units of their own; only folds remain."""
        long = np.flatnonzero(counts > piece)
        pieces = -(-counts[long] // piece)
        parts = np.repeat(item[long], pieces, axis=0)
        nth = _ranges(np.zeros_like(pieces), pieces)
        parts[:, 5] += nth * piece
        parts[:, 6] = np.minimum(parts[:, 5] + piece, parts[:, 6])
        under_run = 0 if self.runs is None else self.runs.own_start[parts[:, 2]]
        parts[:, 7] = (nth == 0) & (np.asarray(under_run) == 0)
        units = np.where(parts[:, 7] == 1, 1, parts[:, 6] - parts[:, 5])
        parts[:, 8] = self.num_partials + np.cumsum(units) - units
        parts[:, 9] = 1
        total = int(units.sum())
        partials = self.num_partials + np.arange(total)
        self.refs.append(np.stack([np.repeat(parts[:, 0], units), partials], axis=1))
        self.num_partials += total
        self.parts.append(parts)
        item[long, 5] = item[long, 6]

    def _prefill(self) -> Int32 | None:
        """Items of neighbouring tokens of one sequence and one key head."""
        plan, seqs = self.plan, self.plan.prefill_seqs
        if not len(seqs):
            return None
        news = plan.host_query_lens[seqs]
        chunk = self._chunk(int(news.sum()))
        chunks = -(-news // chunk)
        seq, new = np.repeat(seqs, chunks), np.repeat(news, chunks)
        nth = _ranges(np.zeros_like(chunks), chunks)
        count = np.minimum(chunk, new - nth * chunk)
        first = plan.host_kv_lens[seq] - new + nth * chunk  # position
        item = _table(len(seq))
        item[:, 0], item[:, 1] = plan.host_cu_seqlens_q[seq] + nth * chunk, count
        item[:, 2] = seq
        if self.window is not None:
            item[:, 5] = np.maximum(0, first - self.window + 1) // UNIT_TOKENS
        if self.runs is not None:
            item[:, 5] = self.runs.own_start[seq] // UNIT_TOKENS
        item[:, 6] = -(-(first + count) // UNIT_TOKENS)
        item = np.repeat(item, self.num_kv_heads, axis=0)
        item[:, 3] = np.tile(np.arange(self.num_kv_heads), len(seq))
        item[:, 4] = item[:, 3] + 1
        return item

    def prepared(self, head_dim: int, types: tuple[int, int, int]) -> Prepared:
        plan, tables = self.plan, self.plan.host_block_tables
        parts = _by_size(np.concatenate(self.parts or [_NONE]))
        both = [items for items in (parts, self.finishes) if len(items)]
        max_rows = max(
            (int((x[:, 1] * (x[:, 4] - x[:, 3])).max()) * self.group for x in both), default=1
        )
        threads = max(1, min(self.threads, max(len(parts), len(self.finishes))))
        library = load_library()
        scratch_floats = int(library.radixkv_attend_scratch(_INT(max_rows), _INT(head_dim)))
        partial_floats = self.num_partials * self.num_q_heads * (head_dim + 2)
        memory = torch.empty(threads * scratch_floats + partial_floats, dtype=torch.float32)
        rows = self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
        ref_start = refs = None
        if self.refs:
            pairs = np.concatenate(self.refs)
            refs = pairs[np.argsort(pairs[:, 0], kind="stable"), 1].astype(np.int32)
            counts = np.bincount(pairs[:, 0], minlength=plan.num_tokens)
            ref_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        step = _Step(
            len(parts),
            len(self.finishes),
            self.num_q_heads,
            self.num_kv_heads,
            head_dim,
            plan.block_size,
            tables.shape[1],
            *types,
            self.window or 0,
            threads,
            scratch_floats,
            max_rows,
            parts.ctypes.data,
            self.finishes.ctypes.data,
            tables.ctypes.data,
            rows.ctypes.data,
            plan.positions.data_ptr(),
            None if ref_start is None else ref_start.ctypes.data,
            None if refs is None else refs.ctypes.data,
            memory.data_ptr() + 4 * threads * scratch_floats,
            memory.data_ptr(),
        )
        keeps = (step, parts, self.finishes, tables, rows, plan.positions, ref_start, refs, memory)
        return Prepared(ctypes.addressof(step), keeps)


def _table(num_items: int) -> Int32:
    return np.zeros((num_items, 10), dtype=np.int32)


_NONE = _table(0)


def _by_size(items: Int32) -> Int32:
    """Bring the longest items forward, so that threads end together."""
    if len(items) > 1:
        work = (items[:, 6] - items[:, 5]) * items[:, 1]
        if work.min() != work.max():
            items = items[np.argsort(-work, kind="stable")]
    return np.ascontiguousarray(items)


def _ranges(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Int32:
    """Concatenate starts[i] + (0 .. counts[i] - 1)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shifts = np.repeat(starts - (ends - counts), counts)
    return (shifts + np.arange(total)).astype(np.int32)
