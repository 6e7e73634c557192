"""Attention for runs of new tokens with torch's fused CPU kernel, one sequence at a time.

Queries of a group are rows of one product, so that the keys are read once for all of them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.dense import attend
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan, Int64

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Where one sequence's queries and keys lie.

    keys    first_key ...... first_query ...... first_query + new
            |---- before ----|------ new -------|
    """

    start: int  # first row of q and out
    new: int
    first_key: int
    first_query: int
    slots: slice | torch.Tensor  # of the keys: a slice if the blocks are one run, else int64


def prefill_torch(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    out: torch.Tensor,
    seqs: Int64,
) -> None:
    """Fill the rows of ``out`` that belong to ``seqs``; shapes as ``paged_attention``.

    seqs  of ``plan.prefill_seqs``, the same for every layer. Softmax and sums in float32. Products
    in q's type where the processor has units for it, else in float32. Never holds scores of more
    than a bounded number of queries.
    """
    window = features.sliding_window
    k_slots, v_slots = k_pool_layer.flatten(0, 1), v_pool_layer.flatten(0, 1)
    compute = q.dtype if q.dtype == torch.bfloat16 and _has_bfloat16_units() else torch.float32
    for segment in plan.once(("torch prefill", window), lambda: _segments(plan, seqs, features)):
        stop = segment.start + segment.new
        queries = q[segment.start : stop]
        keys, values = (take(pool, segment.slots) for pool in (k_slots, v_slots))
        reach = segment.first_query + segment.new - segment.first_key
        whole = features.plain and (window is None or window >= reach)
        if whole and q.device.type == "cpu":
            attend_fused(
                queries.to(compute), keys.to(compute), values.to(compute), features.scale
            ).to_rows(out[segment.start : stop])
        else:
            out[segment.start : stop] = attend(
                queries, keys, values, segment.first_query, segment.first_key, features
            )


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A softmax over some of the keys: what it gives, and the log of its denominator."""

    out: torch.Tensor  # [num_kv_heads, group, n, head_dim]
    lse: torch.Tensor  # [num_kv_heads, group, n] float32

    def merge(self, other: "Partial") -> "Partial":
        """Combine with the same queries over other keys."""
        share = torch.sigmoid(self.lse - other.lse).unsqueeze(-1)
        out = torch.lerp(other.out.float(), self.out.float(), share)
        return Partial(out, torch.logaddexp(self.lse, other.lse))

    def to_rows(self, rows: torch.Tensor) -> None:
        """Store as [n, num_q_heads, head_dim]."""
        heads, group, n, head_dim = self.out.shape
        rows.view(n, heads, group, head_dim).copy_(self.out.permute(2, 0, 1, 3))


def attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Partial:
    """Attend n queries to the keys before them, unmasked, and to the last n keys, causally.

    q [n, num_q_heads, head_dim]; k, v [m, num_kv_heads, head_dim] with m >= n. The fused kernel
    aligns its causal mask with the first key, so the two parts are separate calls.
    """
    n, num_q_heads, head_dim = q.shape
    m, heads, _ = k.shape
    group = num_q_heads // heads
    queries = q.reshape(n, heads, group, head_dim).permute(1, 2, 0, 3).contiguous()
    keys, values = k.transpose(0, 1).unsqueeze(1), v.transpose(0, 1).unsqueeze(1)
    # Heads are the batch and a group's queries its heads: keys are shared without a copy.
    own = Partial(
        *flash(
            queries,
            keys[:, :, m - n :].expand(heads, group, n, head_dim),
            values[:, :, m - n :].expand(heads, group, n, head_dim),
            is_causal=True,
            scale=scale,
        )
    )
    if m == n:
        return own
    folded = queries.view(heads, 1, group * n, head_dim)
    before, lse = flash(folded, keys[:, :, : m - n], values[:, :, : m - n], scale=scale)
    return own.merge(Partial(before.view(queries.shape), lse.view(heads, group, n)))


def _segments(plan: AttentionPlan, seqs: Int64, features: Features) -> list[_Segment]:
    return [_segment(plan, seq, features) for seq in seqs.tolist()]


def _segment(plan: AttentionPlan, seq: int, features: Features) -> _Segment:
    start, stop = (int(x) for x in plan.host_cu_seqlens_q[seq : seq + 2])
    kv_len = int(plan.host_kv_lens[seq])
    first_query = kv_len - (stop - start)
    first_key = features.first_visible(first_query)
    slots = slots_in_place(plan, seq, first_key, kv_len)
    return _Segment(start, stop - start, first_key, first_query, slots)


def slots_in_place(plan: AttentionPlan, seq: int, start: int, stop: int) -> slice | torch.Tensor:
    """Slots of positions ``start : stop``: a slice where the blocks are one run."""
    indices = plan.slots_of(seq, start, stop)
    if indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(indices).to(plan.device)


def take(slots: torch.Tensor, wanted: slice | torch.Tensor) -> torch.Tensor:
    return slots[wanted] if isinstance(wanted, slice) else slots.index_select(0, wanted)


def _has_bfloat16_units() -> bool:
    """Whether bfloat16 products are the processor's own; without, they are slower than float32."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    units = torch.cpu.get_capabilities()
    return any(units.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
