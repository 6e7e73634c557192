"""Decode with torch's own operators: sequences of similar length together, keys gathered once.

The way where no compiler is, and the second opinion on the compiled kernel.
"""

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.dense import soften
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan, Int32, Int64

PADDING = 1.25  # a bucket is at most this much longer than its shortest sequence ...
SLACK_TOKENS = 32  # ... or by this many tokens: short sequences cost calls, not reads
BUCKET_TOKENS = 1 << 12  # keys gathered at a time, so that the copy is read back from cache


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Sequences that are attended in one go, as index tensors on the plan's device."""

    rows: torch.Tensor  # int64 [B] rows of q and out
    slots: torch.Tensor  # int64 [B * L], padding repeats a slot of the same sequence
    distance: torch.Tensor  # int64 [B, L] key position minus query position; > 0 is padding
    mask: torch.Tensor | None  # float32 [B, 1, 1, L], -inf on padding; None where there is none


def decode_torch(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    out: torch.Tensor,
    seqs: Int64,
) -> None:
    """Fill the rows of ``out`` that belong to ``seqs``; shapes as ``paged_attention``.

    seqs  of ``plan.decode_seqs``, the same for every layer. Softmax and sums in float32.
    """
    window = features.sliding_window
    num_kv_heads, head_dim = k_pool_layer.shape[2:]
    k_slots, v_slots = k_pool_layer.flatten(0, 1), v_pool_layer.flatten(0, 1)
    for bucket in plan.once(("torch decode", window), lambda: buckets(plan, seqs, window)):
        count, length = bucket.distance.shape
        queries = q[bucket.rows].float().view(count, num_kv_heads, -1, head_dim)
        keys, values = (
            pool.index_select(0, bucket.slots)
            .float()
            .view(count, length, num_kv_heads, head_dim)
            .transpose(1, 2)
            for pool in (k_slots, v_slots)
        )
        if features.plain:
            # The queries of a group are the rows of one product: keys are read once for all.
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=bucket.mask, scale=features.scale
            )
        else:
            scores = torch.matmul(queries, keys.transpose(2, 3))  # [B, kv heads, group, L]
            distance = bucket.distance[:, None, None]
            heads = (num_kv_heads, q.shape[1] // num_kv_heads, 1)
            weights = soften(scores, distance, distance > 0, features, heads)
            attended = torch.matmul(weights, values)
        out[bucket.rows] = attended.reshape(count, -1, head_dim).to(out.dtype)


def buckets(
    plan: AttentionPlan, seqs: Int64, window: int | None, starts: Int32 | None = None
) -> list[Bucket]:
    """Put sequences with one new token and about as many keys together.

    starts  [S] the first key of each sequence of the plan that counts; 0 if None
    """
    lengths = plan.host_kv_lens[seqs].astype(np.int64)
    if starts is not None:
        lengths -= starts[seqs]
    if window is not None:
        lengths = np.minimum(lengths, window)
    filled: list[Bucket] = []
    members: list[int] = []
    for i in np.argsort(lengths, kind="stable"):
        longest = int(lengths[i])
        shortest = int(lengths[members[0]]) if members else longest
        too_long = longest > max(shortest * PADDING, shortest + SLACK_TOKENS)
        if members and (too_long or longest * (len(members) + 1) > BUCKET_TOKENS):
            filled.append(_bucket(plan, seqs[members], lengths[members]))
            members = []
        members.append(int(i))
    if members:
        filled.append(_bucket(plan, seqs[members], lengths[members]))
    return filled


def _bucket(plan: AttentionPlan, seqs: Int64, lengths: Int64) -> Bucket:
    steps = np.arange(int(lengths[-1]))
    ends = plan.host_kv_lens[seqs].astype(np.int64)
    positions = (ends - lengths)[:, None] + steps
    distance = positions - (ends - 1)[:, None]
    positions = np.minimum(positions, (ends - 1)[:, None])
    blocks, offsets = np.divmod(positions, plan.block_size)
    slots = plan.host_block_tables[seqs[:, None], blocks].astype(np.int64) * plan.block_size
    rows = plan.host_cu_seqlens_q[seqs].astype(np.int64)
    indices, reach = (slots + offsets).ravel(), torch.from_numpy(distance)
    padding = reach[:, None, None] > 0
    mask = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf) if padding.any() else None
    return Bucket(
        torch.from_numpy(rows).to(plan.device),
        torch.from_numpy(indices).to(plan.device),
        reach.to(plan.device),
        None if mask is None else mask.to(plan.device),
    )
