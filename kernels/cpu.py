"""The CPU backends: who computes which rows of a step. Knows no arithmetic of its own.

"native" gives whole steps to the compiled kernel where that knows their types and shapes; "torch"
does everything with torch's own operators.
"""

import torch

from radixkv.kernels.features import Features
from radixkv.kernels.native_attention import attend_native, supports
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.torch_decode import decode_torch
from radixkv.kernels.torch_prefill import prefill_torch
from radixkv.kernels.torch_tree import attend_tree, tree_of


def paged_attention_torch(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    *,
    native: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says, on any device torch knows."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if native and supports(q, k_pool_layer):
        attend_native(q, k_pool_layer, v_pool_layer, plan, features, out)
        return out
    decode, prefill = plan.decode_seqs, plan.prefill_seqs
    tree = tree_of(plan, features.sliding_window)
    if tree is not None:
        decode, prefill = tree.flat_decode, tree.flat_prefill
        attend_tree(q, k_pool_layer, v_pool_layer, tree, features, out)
    if len(decode):
        decode_torch(q, k_pool_layer, v_pool_layer, plan, features, out, decode)
    if len(prefill):
        prefill_torch(q, k_pool_layer, v_pool_layer, plan, features, out, prefill)
    return out
