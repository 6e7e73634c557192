"""Attention for runs of new tokens with torch's fused CPU kernel, one sequence at a time.

Queries of a group are folded into the query-length axis: the fused kernel reads the keys once for
all of them (its own way with grouped heads is several times slower).
"""

import torch

from radixkv.kernels.dense import attend
from radixkv.kernels.plan import AttentionPlan


def prefill_torch(q, k_pool_layer, v_pool_layer, plan, features, out) -> None:
    k_slots, v_slots = k_pool_layer.flatten(0, 1), v_pool_layer.flatten(0, 1)
    for s in plan.prefill_seqs.tolist():
        start, stop = (int(x) for x in plan.host_cu_seqlens_q[s : s + 2])
        kv_len = int(plan.host_kv_lens[s])
        first_query = kv_len - (stop - start)
        first_key = features.first_visible(first_query)
        slots = _slots(plan, s, first_key)
        keys, values = k_slots.index_select(0, slots), v_slots.index_select(0, slots)
        out[start:stop] = attend(q[start:stop], keys, values, first_query, first_key, features)


def _slots(plan: AttentionPlan, seq: int, first_key: int) -> torch.Tensor:
    def make() -> torch.Tensor:
        slots = plan.slots_of(seq, first_key, int(plan.host_kv_lens[seq]))
        return torch.from_numpy(slots).to(plan.device)

    return plan.once(("slots", seq, first_key), make)
