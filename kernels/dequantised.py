"""Brings the quantised blocks that a step names to float32, for backends that know no codes.

Costs memory for those blocks, a layer at a time; nothing that grows with the pool.
"""

import numpy as np
import torch

from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.quant import dequantise


def dequantised(
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
    """Return small float32 pools of the blocks that the plan names, and the plan over them."""
    blocks, small = plan.once("dequantised", lambda: _over_named_blocks(plan))
    k, v = (
        dequantise(pool.view(torch.uint8)[blocks].view(pool.dtype), scales[blocks])
        for pool, scales in ((k_pool_layer, k_scales), (v_pool_layer, v_scales))
    )
    return k, v, small


def _over_named_blocks(plan: AttentionPlan) -> tuple[torch.Tensor, AttentionPlan]:
    tables = plan.host_block_tables
    counts = -(-plan.host_kv_lens // plan.block_size)
    used = np.arange(tables.shape[1]) < counts[:, None]
    blocks, places = np.unique(tables[used], return_inverse=True)
    renamed = np.zeros_like(tables)
    renamed[used] = places
    small = AttentionPlan.build(
        plan.host_query_lens,
        plan.host_kv_lens,
        renamed,
        plan.block_size,
        plan.device,
        share=plan.share,
    )
    return torch.from_numpy(blocks.astype(np.int64)).to(plan.device), small
