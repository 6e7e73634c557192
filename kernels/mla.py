"""Attention over the latent cache of multi-head latent attention (MLA), absorbed.

Knows latents and rotary parts; nothing of the projections that make them, nor of who shares blocks.

    pool layer  [num_blocks, block_size, rank + rope]     one vector a token, for all query heads
                 '---- latent ----''- rope -'

A head's key is its own projection of the latent, beside the rope part that all heads share; its
value is another projection of the latent. Projecting the query into the latent space instead, once,
saves projecting every key:  q . (W_k c) = (W_k^T q) . c.  The result is a latent too, and its owner
applies W_v to it.
"""

from collections.abc import Callable

import torch

from radixkv.kernels.checks import expect, expect_inside
from radixkv.kernels.dispatch import runs_on_triton
from radixkv.kernels.plan import AttentionPlan


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each new token to the tokens 0..its own position of its sequence, in latent space.

    q_latent    [T, num_heads, rank] queries absorbed into the latent space, any strides
    q_rope      [T, num_heads, rope] their rotary part, any strides
    pool_layer  [num_blocks, block_size, rank + rope] contiguous, the new tokens already written
    scale       multiplies the score, (head_dim of the unabsorbed query) ** -0.5 as a rule
    backend     "auto", "torch", "triton" or "reference"
    return      [T, num_heads, rank], q_latent's dtype and device

    Made for one new token a sequence; several work, each at the cost of one. Softmax and sums are
    in float32, over splits of the keys at fixed positions: a row's bits are those of its own keys.
    """
    expect(q_latent.dim() == 3, "q_latent", "[T, num_heads, rank]", q_latent)
    expect(len(q_latent) == plan.num_tokens, "q_latent", f"of {plan.num_tokens} rows", q_latent)
    rank, rope = q_latent.shape[2], q_rope.shape[-1]
    expect(q_rope.shape == (*q_latent.shape[:2], rope), "q_rope", "[T, num_heads, rope]", q_rope)
    expect(q_rope.dtype == q_latent.dtype, "q_rope", f"of type {q_latent.dtype}", q_rope)
    like = pool_layer.dim() == 3 and pool_layer.is_contiguous()
    like = like and pool_layer.shape[1:] == (plan.block_size, rank + rope)
    wanted = f"contiguous [num_blocks, {plan.block_size}, {rank + rope}]"
    expect(like, "pool_layer", wanted, pool_layer)
    if backend == "auto":
        backend = "triton" if runs_on_triton(q_latent) else "torch"
    if backend == "triton":
        from radixkv.kernels.triton_mla import mla_attention_triton

        return mla_attention_triton(q_latent, q_rope, pool_layer, plan, scale)
    backends: dict[str, Callable[..., torch.Tensor]] = {
        "torch": mla_attention_torch,
        "reference": mla_attention_reference,
    }
    if backend not in backends:
        raise ValueError(f"backend must be auto, torch, triton or reference, got {backend!r}")
    return backends[backend](q_latent, q_rope, pool_layer, plan, scale)


def write_latents(latents: torch.Tensor, pool_layer: torch.Tensor, slots: torch.Tensor) -> None:
    """Store the vector of token ``t`` at slot ``slots[t]`` of one layer, in place.

    latents     [T, rank + rope], any strides, any float dtype (cast to the pool's)
    pool_layer  [num_blocks, block_size, rank + rope] contiguous
    slots       [T] int64, distinct; one outside the pool is treated as ``write_kv`` treats it
    """
    expect(pool_layer.dim() == 3 and pool_layer.is_contiguous(), "pool_layer", "3-d", pool_layer)
    expect(latents.shape[1:] == pool_layer.shape[2:], "latents", "[T, rank + rope]", latents)
    expect(slots.shape == latents.shape[:1], "slots", f"[{len(latents)}]", slots)
    if runs_on_triton(pool_layer):
        from radixkv.kernels.triton_mla import write_latents_triton

        write_latents_triton(latents, pool_layer, slots)
    else:
        expect_inside("slots", slots, pool_layer.shape[0] * pool_layer.shape[1])
        pool_layer.flatten(0, 1).index_copy_(0, slots, latents.to(pool_layer.dtype))


def mla_attention_torch(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Attend with torch's own operators: every sequence is two products, whatever its heads."""
    rank = q_latent.shape[2]
    queries = torch.cat([q_latent, q_rope], dim=2).float()
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    for rows, keys, position in _sequences(pool_layer, plan):
        keys = keys.float()
        scores = queries[rows].flatten(0, 1) @ keys.T * scale  # [new * heads, kv_len]
        scores = scores.view(-1, q_latent.shape[1], len(keys))
        behind = torch.arange(len(keys), device=keys.device) > position[:, None]
        scores.masked_fill_(behind[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1).flatten(0, 1)
        out[rows] = (weights @ keys[:, :rank]).view(-1, *q_latent.shape[1:]).to(out.dtype)
    return out


def mla_attention_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool_layer: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """The truth: float64, one query at a time, the definition written down."""
    rank = q_latent.shape[2]
    out = torch.zeros(q_latent.shape, dtype=torch.float64, device=q_latent.device)
    for rows, keys, position in _sequences(pool_layer, plan):
        for row, last in zip(range(rows.start, rows.stop), position.tolist(), strict=True):
            seen = keys[: last + 1].double()
            latents, ropes = seen[:, :rank], seen[:, rank:]
            scores = q_latent[row].double() @ latents.T + q_rope[row].double() @ ropes.T
            out[row] = torch.softmax(scores * scale, dim=-1) @ latents
    return out.to(q_latent.dtype)


def _sequences(
    pool_layer: torch.Tensor, plan: AttentionPlan
) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For each sequence with new tokens: its rows, its vectors [kv_len, width], rows' positions."""
    found = []
    for s in range(plan.num_seqs):
        rows = slice(*(int(x) for x in plan.host_cu_seqlens_q[s : s + 2]))
        if rows.start < rows.stop:
            kv_len = int(plan.host_kv_lens[s])
            table = plan.block_tables[s, : -(-kv_len // plan.block_size)].long()
            keys = pool_layer[table].flatten(0, 1)[:kv_len]
            found.append((rows, keys, plan.positions[rows]))
    return found
