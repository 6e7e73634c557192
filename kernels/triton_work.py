"""Lists what each program of the Triton attention kernels does in a step; numpy only.

Knows the plan, who shares which run of keys and the sizes of the launches. Rows of partial results
("slots") are laid out so that the parts of one query lie side by side, in order of position:

    query of sequence s   | run 0, piece 0 | piece 1 | run 1, piece 0 | own 0 | own 1 |
    slot                  first            + 1       + 2              + 3     + 4     first + parts

A query with a single part has no slot, unless every row is to be merged: the kernel that attends it
stores the result.

Kernels read true lengths on the device. So a flat decode step that was captured in a CUDA graph
with a plan of the longest lengths replays with any shorter ones, once the plan's tensors on the
device are overwritten: a program whose keys are not there yet says so in its slot and ends. Not so
with a sliding window, whose first split follows from the length, nor where runs are shared; a graph
for those reads lists that are overwritten too (``triton_fixed``).
"""

from dataclasses import dataclass

import numpy as np

from radixkv.kernels.plan import AttentionPlan, Int32, Int64
from radixkv.kernels.tree import SharedRuns

ENOUGH_PROGRAMS = 2048
"""So many programs fill any GPU several times; with more rows under a run its pieces get longer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much one program takes on; keys in tokens, of one key head."""

    split: int  # keys of a decoding sequence, at multiples of this
    prefill_queries: int
    run: int  # keys of a shared run, at least
    run_queries: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The lists of one step; host arrays, a program (or row) a line."""

    decode: Int32  # [n, 3] sequence, first key, slot or -1
    prefill: Int32  # [n, 5] sequence, first query, first key, slot of the first query or -1, parts
    runs: Int32  # [n, 6] sequence with the blocks, keys start, stop, queries first, last, piece
    run_queries: Int32  # [m, 2] row of q, its slot for piece 0 of the run
    merge: Int32  # [n, 3] row of q, first slot, parts
    num_slots: int


def list_work(
    plan: AttentionPlan,
    window: int | None,
    runs: SharedRuns | None,
    s: Sizes,
    *,
    merge_all: bool = False,
) -> Work:
    """List the work of a step. O(sequences + runs + programs) steps in numpy.

    merge_all   give even a single part a slot: then each row is a line of ``merge``

    Where runs are given, their bounds are multiples of ``s.split``. A sequence whose new tokens
    fill a program by themselves gains nothing by company and is left out of them.
    """
    queries = plan.host_query_lens.astype(np.int64)
    cached = plan.host_kv_lens - queries
    own_start = np.zeros(plan.num_seqs, dtype=np.int64)
    shared = np.zeros(plan.num_seqs, dtype=np.int64)  # parts that runs give
    visible = np.zeros(plan.num_seqs, dtype=np.int64)  # first key that some query sees
    if window is not None:
        visible = np.maximum(cached - window + 1, 0)
    run_lines, members, ordinals = _empty(6), _empty(), _empty()
    if runs is not None:
        own_start = np.where(queries < s.prefill_queries, runs.own_start, 0).astype(np.int64)
        run_lines, members, ordinals, shared = _share_out(runs, queries, visible, s)
    first_key = np.maximum(own_start, visible)

    decode = plan.decode_seqs
    first_split = first_key[decode] // s.split
    splits = cached[decode] // s.split - first_split + 1
    parts = shared + (queries > 0)
    parts[decode] += splits - 1
    apart = parts > (0 if merge_all else 1)
    slots = np.where(apart, parts * queries, 0)
    first_slot = np.where(apart, np.cumsum(slots) - slots, -1)

    which, nth = _count_up(splits)
    seqs = decode[which]
    at = np.where(apart[seqs], first_slot[seqs] + shared[seqs] + nth, -1)
    decode_lines = np.stack([seqs, (first_split[which] + nth) * s.split, at], axis=1)

    which, nth = _count_up(-(-queries[plan.prefill_seqs] // s.prefill_queries))
    seqs, first = plan.prefill_seqs[which], nth * s.prefill_queries
    at = np.where(apart[seqs], first_slot[seqs] + first * parts[seqs] + shared[seqs], -1)
    prefill_lines = np.stack([seqs, first, own_start[seqs], at, parts[seqs]], axis=1)
    # Programs start in order, so the longest go first and none of them ends alone.
    prefill_lines = prefill_lines[np.argsort(-(cached - own_start)[seqs] - first, kind="stable")]

    merged = np.flatnonzero(apart & (queries > 0))
    which, nth = _count_up(queries[merged])
    seqs = merged[which]
    rows = plan.host_cu_seqlens_q[seqs] + nth
    merge_lines = np.stack([rows, first_slot[seqs] + nth * parts[seqs], parts[seqs]], axis=1)
    which, nth = _count_up(queries[members])
    seqs = members[which]
    at = first_slot[seqs] + nth * parts[seqs] + ordinals[which]
    run_queries = np.stack([plan.host_cu_seqlens_q[seqs] + nth, at], axis=1)
    return Work(
        decode=decode_lines.astype(np.int32),
        prefill=prefill_lines.astype(np.int32),
        runs=run_lines.astype(np.int32),
        run_queries=run_queries.astype(np.int32),
        merge=merge_lines.astype(np.int32),
        num_slots=int(slots.sum()),
    )


def _share_out(
    runs: SharedRuns, queries: Int64, visible: Int64, s: Sizes
) -> tuple[Int64, Int64, Int64, Int64]:
    """Cut runs into pieces of keys and their queries into stacks: one program for each pair.

    Return the lines, the members of all runs, how many parts each has before the run's, and the
    parts that each sequence gets.
    """
    stays = queries[runs.seqs] < s.prefill_queries
    members = runs.seqs[stays].astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(stays)])[runs.seq_ptr]
    ends = np.concatenate([[0], np.cumsum(queries[members])])[bounds]
    stacks = -(-np.diff(ends) // s.run_queries)
    # Pieces that the windows of all members have left behind are nobody's.
    first_seen = np.minimum.reduceat(visible[runs.seqs], runs.seq_ptr[:-1]) // s.split * s.split
    begin = np.maximum(runs.run_start, first_seen)
    tokens = np.maximum(runs.run_stop - begin, 0)
    piece = s.run
    while (-(-tokens // piece) * stacks).sum() * s.num_kv_heads > ENOUGH_PROGRAMS:
        if piece >= tokens.max():
            break
        piece *= 2
    pieces = -(-tokens // piece)
    before, given = np.zeros(len(members), dtype=np.int64), np.zeros(len(queries), dtype=np.int64)
    for run, count in enumerate(pieces.tolist()):
        inside = members[bounds[run] : bounds[run + 1]]
        before[bounds[run] : bounds[run + 1]] = given[inside]
        given[inside] += count

    # The stacks of one piece are neighbours: the later ones find its keys in the cache.
    which, nth = _count_up(pieces * stacks)
    part, stack = np.divmod(nth, stacks[which])
    start = begin[which] + part * piece
    stop = np.minimum(start + piece, runs.run_stop[which])
    first = ends[which] + stack * s.run_queries
    last = np.minimum(first + s.run_queries, ends[which + 1])
    lines = np.stack([runs.run_seq[which], start, stop, first, last, part], axis=1)
    return lines, members, before, given


def _count_up(counts: Int64) -> tuple[Int64, Int64]:
    """Repeat each index as its count says, and number the repetitions: [0 0 1], [0 1 0]."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def _empty(*columns: int) -> Int64:
    return np.empty((0, *columns), dtype=np.int64)
