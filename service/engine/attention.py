"""Plugs paged attention into transformers' models; knows their interface, not their kinds.

A model whose attention implementation is ``radixkv`` calls ``paged_attention_forward`` in every
layer. What the layer needs of the step travels as the keyword ``radixkv`` through the model's
forward. The name has no mask function, and transformers then makes no mask at all. Nothing in here
stops a compiler: the layer's work is one operator, and the step is a bundle of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node
from transformers import AttentionInterface

from radixkv.kernels.layout import KVPool
from radixkv.kernels.op import number_of, write_and_attend
from radixkv.kernels.plan import AttentionPlan

IMPLEMENTATION = "radixkv"


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """What each layer needs of the step: where keys and values lie, and by number who reads which.

    The plan must be kept by whoever makes the step for as long as the step is used.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    plan: torch.Tensor
    backend: str = "auto"

    @classmethod
    def of(cls, pool: KVPool, plan: AttentionPlan, backend: str = "auto") -> PagedStep:
        """Bundle a pool and a plan."""
        return cls(pool.data, pool.scales, number_of(plan), backend)


def _unbundle(step: PagedStep) -> tuple[list[torch.Tensor | None], str]:
    return [step.data, step.scales, step.plan], step.backend


def _unbundle_by_name(step: PagedStep) -> tuple[list[tuple[Any, torch.Tensor | None]], str]:
    tensors, backend = _unbundle(step)
    names = ("data", "scales", "plan")
    return [(GetAttrKey(n), x) for n, x in zip(names, tensors, strict=True)], backend


def _bundle(tensors: Iterable[Any], backend: Any) -> PagedStep:
    data, scales, plan = tensors
    return PagedStep(data, scales, plan, backend)


register_pytree_node(  # as torch.export wants it of what is handed to a model
    PagedStep,
    _unbundle,
    _bundle,
    serialized_type_name="radixkv.PagedStep",
    flatten_with_keys_fn=_unbundle_by_name,
)


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
    out = write_and_attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        radixkv.data,
        radixkv.scales,
        radixkv.plan,
        module.layer_idx,  # type: ignore[arg-type]
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
