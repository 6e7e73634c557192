"""The CPU backends: who computes which rows of a step. Knows no arithmetic of its own.

"native" gives sequences with one new token to the compiled kernel; "torch" does everything with
torch's own operators. Both give longer runs of new tokens to torch, whose products are the
processor's best there.
"""

import torch

from radixkv.kernels.features import Features
from radixkv.kernels.native_attention import attend_native, supports
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.torch_decode import decode_torch
from radixkv.kernels.torch_prefill import prefill_torch


def paged_attention_torch(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    *,
    native: bool = False,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says, on any device torch knows."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if native and supports(q, k_pool_layer):
        attend_native(q, k_pool_layer, v_pool_layer, plan, features, out)
        return out
    if len(plan.decode_seqs):
        decode_torch(q, k_pool_layer, v_pool_layer, plan, features, out)
    if len(plan.prefill_seqs):
        prefill_torch(q, k_pool_layer, v_pool_layer, plan, features, out)
    return out
