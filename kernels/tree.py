"""Finds the stretches of keys that several sequences of one step have in common.

Knows block tables and prices; nothing of the tree that shared the blocks, of heads or of values.

    s0  |--- tenant prompt ---|--- document ---|- own -      runs   [0, 10) of s0 s1 s2 s3
    s1  |--- tenant prompt ---|--- document ---|--- own               [10, 15) of s0 s1
    s2  |--- tenant prompt ---|-- own --                     own_start  15 15 10 10
    s3  |--- tenant prompt ---|---- own ----
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from radixkv.kernels.checks import expect
from radixkv.kernels.plan import AttentionPlan, Int32, Int64


@dataclass(frozen=True, slots=True)
class CostModel:
    """What sharing saves and what it costs, all in one unit of time of the backend's choice.

    token  saved for each token of a run and each member but one: somebody has to read it
    run    paid for each run: one more call, its queries gathered
    row    paid for each query of a member in each run: a partial result written and merged
    step   paid once as soon as anything is shared
    """

    token: float
    run: float = 0.0
    row: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SharedRuns:
    """Stretches of keys that several sequences of a step have in common, each to be read once.

    All queries of a member stand behind the run: kv_len - query_len >= run_stop. The runs of one
    sequence are disjoint, ascending and tile [0, own_start): several levels where prefixes branch.
    """

    run_seq: Int32  # [R] a sequence of the plan whose block table names the run's blocks
    run_start: Int32  # [R] first token (position)
    run_stop: Int32  # [R] one past the last; like run_start a multiple of the granularity
    seq_ptr: Int32  # [R + 1]
    seqs: Int32  # [seq_ptr[-1]] under run r: seqs[seq_ptr[r] : seq_ptr[r + 1]], >= 2, ascending
    own_start: Int32  # [S] where a sequence's own rest begins: keys [own_start, kv_len)

    @property
    def num_runs(self) -> int:
        return len(self.run_seq)

    def members(self, run: int) -> Int32:
        return self.seqs[self.seq_ptr[run] : self.seq_ptr[run + 1]]


def shared_runs(plan: AttentionPlan, granularity: int, cost: CostModel) -> SharedRuns | None:
    """Say what to read once for whom; None where reading each sequence by itself is not slower.

    Sharing shows as equal leading entries of the block tables. ``granularity`` in tokens, any
    relation to the block size. O(table bytes) compared by memcmp plus O(S log S) steps; the answer
    is kept with the plan.
    """
    expect(granularity > 0, "granularity", "positive", granularity)
    if not plan.share:
        return None
    key = ("shared runs", granularity, cost)
    return plan.once(key, lambda: _find(plan, granularity, cost))


@dataclass(slots=True, eq=False)
class _Edge:
    """Tokens [start, stop) common to the candidates ``first .. last`` in sorted order.

    ``taken`` are the topmost worthwhile edges below, ``saved`` the reads that they save a token.
    """

    first: int
    stop: int
    last: int = -1
    start: int = 0
    saved: int = 0
    taken: list["_Edge"] = field(default_factory=list)


def _find(plan: AttentionPlan, granularity: int, cost: CostModel) -> SharedRuns | None:
    cached = plan.host_kv_lens - plan.host_query_lens
    reach = cached // granularity * granularity
    candidates = np.flatnonzero((reach > 0) & (plan.host_query_lens > 0))
    if len(candidates) < 2:
        return None
    first_blocks = plan.host_block_tables[candidates, 0]
    if len(np.unique(first_blocks)) == len(candidates):
        return None
    order, common = _sorted_by_prefix(plan, granularity, candidates, reach[candidates])
    rows = np.concatenate([[0], np.cumsum(plan.host_query_lens[order], dtype=np.int64)])
    top, gain = _choose(common, rows, cost)
    if not top or gain <= cost.step:
        return None
    own_start = np.zeros(plan.num_seqs, dtype=np.int32)
    chosen = sorted(_with_all_below(top), key=lambda edge: (edge.first, edge.start))
    members = [np.sort(order[edge.first : edge.last + 1]) for edge in chosen]
    for edge, seqs in zip(chosen, members, strict=True):
        own_start[seqs] = edge.stop  # later edges of the same sequence are deeper
    return SharedRuns(
        run_seq=np.array([seqs[0] for seqs in members], dtype=np.int32),
        run_start=np.array([edge.start for edge in chosen], dtype=np.int32),
        run_stop=np.array([edge.stop for edge in chosen], dtype=np.int32),
        seq_ptr=np.cumsum([0, *map(len, members)], dtype=np.int32),
        seqs=np.concatenate(members).astype(np.int32),
        own_start=own_start,
    )


def _sorted_by_prefix(
    plan: AttentionPlan, granularity: int, candidates: Int64, reach: Int32
) -> tuple[Int64, list[int]]:
    """Bring sequences with a common prefix side by side; say how many tokens neighbours share.

    Any order of the bytes will do. Of equal tables the one with the shortest reach comes first, so
    that what two sequences share is the least that neighbours between them share.
    """
    size, tables = plan.block_size, plan.host_block_tables
    blocks = -(-reach // size)
    keys = [
        (tables[s, :n].tobytes(), tokens)
        for s, n, tokens in zip(candidates.tolist(), blocks.tolist(), reach.tolist(), strict=True)
    ]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    width = int(blocks.max())
    near = tables[candidates[order], :width]
    differs = near[1:] != near[:-1]
    equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width).astype(np.int64)
    reach = reach[order]
    tokens = np.minimum(equal * size, np.minimum(reach[:-1], reach[1:]))
    return candidates[order], (tokens // granularity * granularity).tolist()


def _choose(common: list[int], rows: Int64, cost: CostModel) -> tuple[list[_Edge], float]:
    """Build the trie of common prefixes and keep the edges that pay; return the topmost of them.

    Edges come up children first. One that does not pay is left to those below it, each of which
    then reads it for its own members: so it is weighed against what they save already.
    """
    root, gain = _Edge(0, 0), 0.0
    path = [root]
    for i, depth in enumerate([*common, 0]):
        first = i
        while path[-1].stop > depth:
            edge = path.pop()
            edge.last, first = i, edge.first
            if path[-1].stop < depth:
                path.append(_Edge(first, depth))
            above = path[-1]
            edge.start = above.stop
            tokens, members = edge.stop - edge.start, edge.last - edge.first + 1
            worth = tokens * (members - 1 - edge.saved) * cost.token
            worth -= cost.run + float(rows[edge.last + 1] - rows[edge.first]) * cost.row
            if worth > 0:
                gain += worth + tokens * edge.saved * cost.token
                above.saved += members - 1
                above.taken.append(edge)
            else:
                gain += tokens * edge.saved * cost.token
                above.saved += edge.saved
                above.taken += edge.taken
        if path[-1].stop < depth:
            path.append(_Edge(first, depth))
    return root.taken, gain


def _with_all_below(edges: list[_Edge]) -> Iterator[_Edge]:
    """Yield the edges and those below them, each lengthened up to where the one above it ends."""
    waiting = [(edge, 0) for edge in edges]
    while waiting:
        edge, start = waiting.pop()
        edge.start = start
        yield edge
        waiting += [(below, edge.stop) for below in edge.taken]
