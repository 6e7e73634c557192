"""Plugs paged attention into transformers' models; knows their interface, not their kinds.

A model whose attention implementation is ``radixkv`` calls ``paged_attention_forward`` in every
layer. What the layer needs of the step travels as the keyword ``radixkv`` through the model's
forward. The name has no mask function, and transformers then makes no mask at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.write import write_kv

IMPLEMENTATION = "radixkv"


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """What each layer needs of the step: where its keys and values lie, and who reads which."""

    pool: KVPool
    plan: AttentionPlan
    backend: str = "auto"


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    radixkv: PagedStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write a layer's new keys and values into its pool, then attend through the block tables.

    query, key, value  [1, heads, T, head_dim], the packed new tokens of all sequences
    return             [1, T, heads, head_dim]

    The keywords named here are all that may change the result; ``support`` refuses models that
    pass others.
    """
    if radixkv is None:
        raise RuntimeError(
            "this model's attention reads a paged KV pool, so its forward works only through "
            "ModelRunner; use own_attention(model) to call it directly"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    pool, plan = radixkv.pool, radixkv.plan
    k_layer, v_layer = pool.k[layer], pool.v[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_layer, v_layer, plan.slots)
    out = paged_attention(
        query[0].transpose(0, 1),
        k_layer,
        v_layer,
        plan,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
        backend=radixkv.backend,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


def use_paged_attention(model: Any) -> None:
    """Switch a model in memory to paged attention, in place."""
    model.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def attention_of(model: Any, implementation: str) -> Iterator[Any]:
    """Let a model attend by one of transformers' names within the block, and as before after it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def own_attention(model: Any, implementation: str | None = None) -> AbstractContextManager[Any]:
    """Give a served model its own attention back within the block, for transformers' ``generate``.

    ``implementation`` is ``sdpa`` where the model has it, else ``eager``. Nothing else may run the
    model meanwhile.
    """
    return attention_of(model, implementation or ("sdpa" if model._supports_sdpa else "eager"))
