"""Tree attention with torch's own operators: each shared run is one product for all rows under it.

Knows runs and partial results; who shares what is ``tree``'s, the rest of each sequence is its own.
The CPU only: the fused kernel there gives the log of the softmax's denominator, by which partial
results of the same row are merged.
"""

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan, Int64
from radixkv.kernels.torch_decode import Bucket, buckets
from radixkv.kernels.torch_prefill import flash, slots_in_place, take
from radixkv.kernels.tree import CostModel, SharedRuns, shared_runs

COST = CostModel(token=1.0, run=500.0, row=16.0, step=1500.0)
"""In tokens that one sequence reads by itself, 0.3 to 0.7 us on one core for 3 key heads of 64."""

MAX_SCORES = 1 << 21  # scores held at a time where the fused kernel does not know a feature


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Keys that all of ``rows`` see."""

    rows: torch.Tensor  # int64 [n] of q and out
    positions: torch.Tensor  # int64 [n]
    start: int
    slots: slice | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """What a step shares, as index tensors: made once, read in every layer."""

    rows: torch.Tensor  # int64 all rows of sequences under a run
    runs: list[_Run]
    decodes: list[Bucket]  # the own rests of those with one new token
    prefills: list[_Run]  # the own rests of the others; their last keys are the rows themselves
    flat_decode: Int64  # sequences under no run
    flat_prefill: Int64


def tree_of(plan: AttentionPlan, window: int | None) -> Tree | None:
    """What the sequences of a step share, kept with the plan; None where flat is not slower.

    A sliding window bounds what there is to read, so windowed steps stay flat.
    """
    if plan.device.type != "cpu" or (window is not None and window < plan.max_kv_len):
        return None
    runs = shared_runs(plan, plan.block_size, COST)
    return None if runs is None else plan.once(("torch tree", COST), lambda: _tree(plan, runs))


def _tree(plan: AttentionPlan, runs: SharedRuns) -> Tree:
    shared = runs.own_start > 0
    decode, prefill = plan.decode_seqs, plan.prefill_seqs

    def run(seqs: Int64, start: int, stop: int) -> _Run:
        rows = np.concatenate([np.arange(*plan.host_cu_seqlens_q[s : s + 2]) for s in seqs])
        places = torch.from_numpy(rows.astype(np.int64))
        slots = slots_in_place(plan, int(seqs[0]), start, stop)
        return _Run(places, plan.positions[places], start, slots)

    own = [
        run(np.array([s]), int(runs.own_start[s]), int(plan.host_kv_lens[s]))
        for s in prefill[shared[prefill]].tolist()
    ]
    common = [
        run(runs.members(r).astype(np.int64), int(runs.run_start[r]), int(runs.run_stop[r]))
        for r in range(runs.num_runs)
    ]
    return Tree(
        rows=torch.from_numpy(np.flatnonzero(np.repeat(shared, plan.host_query_lens))),
        runs=common,
        decodes=buckets(plan, decode[shared[decode]], None, runs.own_start),
        prefills=own,
        flat_decode=decode[~shared[decode]],
        flat_prefill=prefill[~shared[prefill]],
    )


def attend_tree(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    tree: Tree,
    features: Features,
    out: torch.Tensor,
) -> None:
    """Fill ``tree.rows`` of ``out``; shapes as ``paged_attention``. Sums in float32."""
    num_kv_heads, head_dim = k_pool_layer.shape[2:]
    pools = (k_pool_layer.flatten(0, 1), v_pool_layer.flatten(0, 1))
    merged = _Merged(q, num_kv_heads, features)
    for run in (*tree.runs, *tree.prefills):
        keys, values = (take(pool, run.slots).float().transpose(0, 1) for pool in pools)
        queries = merged.queries(run.rows)  # [n, kv heads, group, head_dim]
        causal = run.start + keys.shape[1] > int(run.positions[0])
        folded = queries.permute(1, 2, 0, 3).flatten(1, 2)
        distance = run.start + torch.arange(keys.shape[1]) - run.positions[:, None]
        part = _partial(folded, keys, values, distance, causal, features, queries.shape[2])
        shape = (num_kv_heads, queries.shape[2], len(run.rows))
        merged.add(
            run.rows,
            part[0].view(*shape, head_dim).permute(2, 0, 1, 3),
            part[1].view(shape).permute(2, 0, 1),
        )
    for bucket in tree.decodes:
        count, length = bucket.distance.shape
        keys, values = (
            pool.index_select(0, bucket.slots)
            .float()
            .view(count, length, num_kv_heads, head_dim)
            .transpose(1, 2)
            for pool in pools
        )
        queries = merged.queries(bucket.rows)
        if features.soft_cap is None and features.alibi_slopes is None:
            one, lse = flash(queries, keys, values, attn_mask=bucket.mask, scale=features.scale)
        else:
            scores = torch.matmul(queries, keys.transpose(2, 3))
            distance = bucket.distance[:, None, None]
            one, lse = _soften(
                scores, distance, distance > 0, values, features, (num_kv_heads, -1, 1)
            )
        merged.add(bucket.rows, one, lse)
    out[tree.rows] = merged.out[tree.rows].flatten(1, 2).to(out.dtype)


class _Merged:
    """Partial results of rows, merged as they come."""

    def __init__(self, q: torch.Tensor, num_kv_heads: int, features: Features) -> None:
        rows, num_q_heads, head_dim = q.shape
        group = num_q_heads // num_kv_heads
        self.q = q.view(rows, num_kv_heads, group, head_dim)
        self.out = torch.zeros(rows, num_kv_heads, group, head_dim)
        self.lse = torch.full((rows, num_kv_heads, group), -torch.inf)
        if features.sinks is not None:
            self.lse[:] = features.sinks.float().view(num_kv_heads, group)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        return self.q[rows].float()

    def add(self, rows: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge what ``rows`` get from other keys: out [n, kv heads, group, head_dim]."""
        before = self.lse[rows]
        share = torch.sigmoid(lse - before).unsqueeze(-1)
        self.out[rows] = torch.lerp(self.out[rows], out, share)
        self.lse[rows] = torch.logaddexp(before, lse)


def _partial(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    causal: bool,
    features: Features,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend rows to keys, both [kv heads, rows, head_dim]: [kv heads, group * n, head_dim], LSE.

    distance  [n, keys] key position minus query position; visible where <= 0 if ``causal``
    """
    plain = features.soft_cap is None and features.alibi_slopes is None
    if plain and not causal:
        out, lse = flash(queries[:, None], keys[:, None], values[:, None], scale=features.scale)
        return out[:, 0], lse[:, 0]
    n, parts = len(distance), []
    grouped = queries.view(len(queries), group, n, -1)
    chunk = max(1, MAX_SCORES // (len(queries) * group * keys.shape[1]))
    for r in range(0, n, chunk):
        rows, far = grouped[:, :, r : r + chunk], distance[r : r + chunk]
        if plain:
            mask = torch.zeros(far.shape).masked_fill_(far > 0, -torch.inf)
            heads = (len(queries), group, -1, -1)
            shared_keys, shared_values = (x[:, None].expand(heads) for x in (keys, values))
            part = flash(rows, shared_keys, shared_values, attn_mask=mask, scale=features.scale)
        else:
            scores = torch.matmul(rows, keys[:, None].transpose(2, 3))
            part = _soften(scores, far, far > 0, values[:, None], features, (-1, group, 1, 1))
        parts.append(part)
    out = torch.cat([part[0] for part in parts], dim=2)
    lse = torch.cat([part[1] for part in parts], dim=2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _soften(
    scores: torch.Tensor,
    distance: torch.Tensor,
    hidden: torch.Tensor,
    values: torch.Tensor,
    features: Features,
    head_shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax with soft cap and ALiBi, times values; and the log of its denominator.

    scores      [..., keys], consumed
    head_shape  how a vector [num_q_heads] is viewed to be broadcast against scores
    """
    scores.mul_(features.scale)
    if features.soft_cap is not None:
        scores.div_(features.soft_cap).tanh_().mul_(features.soft_cap)
    if features.alibi_slopes is not None:
        slopes = features.alibi_slopes.float().view(head_shape)
        scores.addcmul_(slopes, distance.float())
    scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(scores.sub_(lse.unsqueeze(-1)).exp_(), values), lse
