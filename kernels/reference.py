"""The truth about paged attention: float64, one sequence at a time, the definition written down.

Slow on purpose and used by tests only; it shares no arithmetic with the backends it judges.
"""

import torch

from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan


def paged_attention_reference(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says, in float64; the result has q's dtype."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k_pool_layer.shape[2]
    for s in range(plan.num_seqs):
        start, stop = (int(x) for x in plan.host_cu_seqlens_q[s : s + 2])
        kv_len = int(plan.host_kv_lens[s])
        if start == stop:
            continue
        table = plan.block_tables[s, : -(-kv_len // plan.block_size)].long()
        keys, values = (
            pool[table].flatten(0, 1)[:kv_len].double().repeat_interleave(group, dim=1)
            for pool in (k_pool_layer, v_pool_layer)
        )
        i = torch.arange(kv_len - (stop - start), kv_len, device=q.device)[:, None]
        j = torch.arange(kv_len, device=q.device)[None, :]

        scores = torch.einsum("ihd,jhd->hij", q[start:stop].double(), keys) * features.scale
        if features.soft_cap is not None:
            scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
        if features.alibi_slopes is not None:
            scores = scores + features.alibi_slopes.double()[:, None, None] * (j - i)
        visible = j <= i
        if features.sliding_window is not None:
            visible &= i - j < features.sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        if features.sinks is not None:
            sinks = features.sinks.double()[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :kv_len]
        # A masked value must not count at all, not even as 0 * NaN.
        values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
        out[start:stop] = torch.einsum("hij,jhd->ihd", weights, values)
    return out.to(q.dtype)
