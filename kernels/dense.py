"""Masked attention of a few queries over a dense run of keys, with every feature; any device.

Knows positions, not blocks: the caller brings keys and values as tensors. The general path of the
torch backend, taken where the fused kernels do not know a feature.
"""

import torch

from radixkv.kernels.features import Features

MAX_SCORES = 1 << 21  # scores held at a time: 8 MiB in float32, so long prompts never need T x T


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_query: int,
    first_key: int,
    features: Features,
) -> torch.Tensor:
    """Attend queries to keys causally; softmax and sums in float32.

    q       [n, num_q_heads, head_dim], row r is at position first_query + r
    k, v    [m, num_kv_heads, head_dim], row c is at position first_key + c
    return  [n, num_q_heads, head_dim] float32; 0 for a query that sees no key
    """
    n, num_q_heads, _ = q.shape
    chunk = max(1, MAX_SCORES // max(1, num_q_heads * len(k)))
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    parts = [
        _attend_chunk(q[r : r + chunk], keys, values, first_query + r, first_key, features)
        for r in range(0, n, chunk)
    ]
    return torch.cat(parts) if parts else q.float()


def _attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_query: int,
    first_key: int,
    features: Features,
) -> torch.Tensor:
    n, num_q_heads, head_dim = q.shape
    num_kv_heads, _, m = keys.shape
    group = num_q_heads // num_kv_heads
    # The queries of a group read the same keys, so they are rows of one product.
    grouped = q.float().view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped.reshape(num_kv_heads, group * n, head_dim), keys)
    scores = scores.view(num_kv_heads, group, n, m) * features.scale
    if features.soft_cap is not None:
        scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
    i = torch.arange(first_query, first_query + n, device=q.device)[:, None]
    j = torch.arange(first_key, first_key + m, device=q.device)[None, :]
    if features.alibi_slopes is not None:
        slopes = features.alibi_slopes.float().view(num_kv_heads, group, 1, 1)
        scores = scores + slopes * (j - i)
    hidden = j > i
    if features.sliding_window is not None:
        hidden |= i - j >= features.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)

    peak = (
        scores.amax(-1, keepdim=True) if m else scores.new_full((*scores.shape[:3], 1), -torch.inf)
    )
    if features.sinks is not None:
        sinks = features.sinks.float().view(num_kv_heads, group, 1, 1)
        peak = torch.maximum(peak, sinks)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if features.sinks is not None:
        total = total + torch.exp(sinks - peak)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    out = torch.matmul(weights.view(num_kv_heads, group * n, m), values)
    out = out.view(num_kv_heads, group, n, head_dim).permute(2, 0, 1, 3)
    return out.reshape(n, num_q_heads, head_dim)
