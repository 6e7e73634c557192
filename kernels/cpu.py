"""The torch backend: paged attention from torch's own operators, made for the CPU."""

import torch

from radixkv.kernels.dense import attend
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan


def paged_attention_torch(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says; sequence by sequence, over gathered keys and values."""
    out = torch.empty_like(q)
    k_slots, v_slots = k_pool_layer.flatten(0, 1), v_pool_layer.flatten(0, 1)
    for s in range(plan.num_seqs):
        start, stop = (int(x) for x in plan.host_cu_seqlens_q[s : s + 2])
        if start == stop:
            continue
        kv_len = int(plan.host_kv_lens[s])
        first_query = kv_len - (stop - start)
        first_key = features.first_visible(first_query)
        slots = _slots(plan, s, first_key)
        keys, values = k_slots.index_select(0, slots), v_slots.index_select(0, slots)
        out[start:stop] = attend(q[start:stop], keys, values, first_query, first_key, features)
    return out


def _slots(plan: AttentionPlan, seq: int, first_key: int) -> torch.Tensor:
    def make() -> torch.Tensor:
        slots = plan.slots_of(seq, first_key, int(plan.host_kv_lens[seq]))
        return torch.from_numpy(slots).to(plan.device)

    return plan.once(("slots", seq, first_key), make)
