"""Cuts the rows and keys of a step into items of the compiled attention, one thread's work each.

Knows plans, shared runs and units of keys; nothing of tensors or pointers.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.kernels.plan import AttentionPlan, Int32
from radixkv.kernels.tree import SharedRuns

UNIT_TOKENS = 256
"""Tokens that get one partial result; the same in csrc/attention.h."""

MAX_ROWS = 96  # rows of one item: its queries, scores and sums stay in a core's second cache
MIN_ROWS = 24  # ... unless that leaves threads idle; fewer rows would hardly share a tile


class Items:
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
        """Read one run for all rows of its members, in pieces where threads would idle."""
        unit = int(runs.run_start[run]) // UNIT_TOKENS
        unit_stop = int(runs.run_stop[run]) // UNIT_TOKENS
        members = runs.members(run)
        rows = _ranges(self.plan.host_cu_seqlens_q[members], self.plan.host_query_lens[members])
        base = sum(map(len, self.rows))
        self.rows.append(rows)
        num_items = -(-len(rows) // self._chunk(len(rows))) * self.num_kv_heads
        wanted = -(-4 * self.threads // num_items) if self.threads > 1 else 1
        piece = -(-(unit_stop - unit) // wanted)
        for at in range(unit, unit_stop, piece):
            self._read(int(runs.run_seq[run]), base, rows, at, min(at + piece, unit_stop))

    def _read(self, seq: int, base: int, rows: Int32, unit: int, unit_stop: int) -> None:
        """Read units of a run for ``rows``, which begin at ``base`` of all rows listed."""
        count, opens = len(rows), unit == 0
        chunk = self._chunk(count)
        first = np.arange(0, count, chunk)
        item = _table(len(first) * self.num_kv_heads)
        head = np.repeat(np.arange(self.num_kv_heads), len(first))
        first = np.tile(first, self.num_kv_heads)
        item[:, 0] = base + first
        item[:, 1] = np.minimum(chunk, count - first)
        item[:, 2] = seq
        item[:, 3], item[:, 4] = head, head + 1
        item[:, 5], item[:, 6], item[:, 7] = unit, unit_stop, opens
        item[:, 8], item[:, 9] = self.num_partials + first, count
        self.parts.append(item)
        units = 1 if opens else unit_stop - unit
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

    def all_parts(self) -> Int32:
        """Return what comes before the finishes, the longest first."""
        return _by_size(np.concatenate(self.parts or [_NONE]))

    def all_rows(self) -> Int32:
        """Return the rows of q that items name."""
        return self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)

    def all_refs(self) -> tuple[Int32 | None, Int32 | None]:
        """Return where each row's partials begin, and all partials by row, in order of position."""
        if not self.refs:
            return None, None
        pairs = np.concatenate(self.refs)
        refs = pairs[np.argsort(pairs[:, 0], kind="stable"), 1].astype(np.int32)
        counts = np.bincount(pairs[:, 0], minlength=self.plan.num_tokens)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), refs

    def max_rows(self, parts: Int32) -> int:
        """Return the rows of the largest item, of ``parts`` or of the finishes."""
        both = [items for items in (parts, self.finishes) if len(items)]
        return max(
            (int((x[:, 1] * (x[:, 4] - x[:, 3])).max()) * self.group for x in both), default=1
        )


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
