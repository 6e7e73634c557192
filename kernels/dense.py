"""The arithmetic of masked softmax with every feature, on dense scores; any device.

Knows positions, not blocks: the caller brings keys and values as tensors.
"""

import torch

from radixkv.kernels.features import Features

MAX_SCORES = 1 << 21  # scores held at a time: 8 MiB in float32, so long prompts never need T x T
MAX_QUERIES = 256  # queries at a time: what lies outside their windows is not even multiplied


def soften(
    scores: torch.Tensor,
    distance: torch.Tensor,
    hidden: torch.Tensor,
    features: Features,
    head_shape: tuple[int, ...],
) -> torch.Tensor:
    """Turn q . k into weights that sum to 1: to less with sinks, to 0 where all is hidden.

    scores      [..., keys] float32, consumed
    distance    key position minus query position, broadcastable to scores
    hidden      true where a key does not count, broadcastable to scores
    head_shape  how a vector [num_q_heads] is viewed to be broadcast against scores
    """
    scores.mul_(features.scale)
    if features.soft_cap is not None:
        scores.div_(features.soft_cap).tanh_().mul_(features.soft_cap)
    if features.alibi_slopes is not None:
        scores.addcmul_(features.alibi_slopes.float().view(head_shape), distance.float())
    scores.masked_fill_(hidden, -torch.inf)
    if features.sinks is None:
        # A row without a visible key would be 0 / 0; every row of ours sees itself.
        return torch.softmax(scores, dim=-1)
    sinks = features.sinks.float().view(head_shape)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = scores.sub_(peak).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + torch.exp(sinks - peak))


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
    k, v    [m, num_kv_heads, head_dim], row c is at position first_key + c; each query sees one
    return  [n, num_q_heads, head_dim] float32
    """
    n, num_q_heads, head_dim = q.shape
    m, num_kv_heads, _ = k.shape
    group = num_q_heads // num_kv_heads
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    positions = torch.arange(first_key, first_key + m, device=q.device)
    chunk = min(MAX_QUERIES, max(1, MAX_SCORES // (num_q_heads * m)))
    parts = []
    for r in range(0, n, chunk):
        rows = q[r : r + chunk].float()
        first, last = first_query + r, first_query + r + len(rows) - 1
        seen = slice(max(0, features.first_visible(first) - first_key), last + 1 - first_key)
        # The queries of a group read the same keys, so they are rows of one product.
        grouped = rows.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(num_kv_heads, -1, head_dim)
        scores = torch.matmul(grouped, keys[:, :, seen])
        distance = positions[seen] - torch.arange(first, last + 1, device=q.device)[:, None]
        hidden = distance > 0
        if features.sliding_window is not None:
            hidden |= distance <= -features.sliding_window
        weights = soften(
            scores.view(num_kv_heads, group, len(rows), -1),
            distance,
            hidden,
            features,
            (num_kv_heads, group, 1, 1),
        )
        part = torch.matmul(weights.view(*grouped.shape[:2], -1), values[:, seen])
        part = part.view(num_kv_heads, group, len(rows), head_dim).permute(2, 0, 1, 3)
        parts.append(part.reshape(len(rows), num_q_heads, head_dim))
    return torch.cat(parts)
