"""Write and attend as one operator of torch's, which compilers carry along without looking inside.

Knows tensors and numbers of plans; the work is that of ``write`` and ``attention``. A plan is no
tensor, so it travels by its number, and the number in a tensor: a graph that was traced with one
plan serves every later one, without a guard and without a new trace.

    radixkv::paged_attention(q, k, v, pool!, scales!, out!, plan, layer, scale, ...) -> ()

The operator changes one layer of the pool (the slots that the plan names) and all of ``out``; it
reads neither what ``out`` held nor anything that is not in its arguments or its plan.
"""

import itertools
import weakref

import torch

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.checks import expect
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.write import write_kv

NAME = "radixkv::paged_attention"

_plans: "weakref.WeakValueDictionary[int, AttentionPlan]" = weakref.WeakValueDictionary()
_numbers: "weakref.WeakKeyDictionary[AttentionPlan, torch.Tensor]" = weakref.WeakKeyDictionary()
_next = itertools.count(1)


def number_of(plan: AttentionPlan) -> torch.Tensor:
    """Give a plan the number by which the operator finds it, int64 [1] on the CPU; once.

    Holds for as long as somebody else keeps the plan; then the number means nothing.
    """
    number = _numbers.get(plan)
    if number is None:
        value = next(_next)
        number = _numbers[plan] = torch.tensor([value])
        _plans[value] = plan
    return number


def _plan_of(number: torch.Tensor) -> AttentionPlan:
    plan = _plans.get(int(number.item()))
    expect(plan is not None, "plan", "the number of a plan that is still in use", int(number))
    assert plan is not None  # for the type checker
    return plan


torch.library.define(
    NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor(b!)? scales, Tensor(c!) out,"
    " Tensor plan, int layer, float scale, int? sliding_window, float? soft_cap, Tensor? sinks,"
    " Tensor? alibi_slopes, str backend) -> ()",
)


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    plan: torch.Tensor,
    layer: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    backend: str,
) -> None:
    step = _plan_of(plan)
    k_pool, v_pool = pool[0, layer], pool[1, layer]
    k_scales, v_scales = (None, None) if scales is None else (scales[0, layer], scales[1, layer])
    write_kv(k, v, k_pool, v_pool, step.slots, k_scales, v_scales)
    paged_attention(
        q,
        k_pool,
        v_pool,
        step,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scales=k_scales,
        v_scales=v_scales,
        backend=backend,
        out=out,
    )


@torch.library.register_fake(NAME)
def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    plan: torch.Tensor,
    layer: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    backend: str,
) -> None:
    """Check what shapes alone can tell; nothing is returned."""
    expect(q.dim() == 3 and out.shape == q.shape, "out", "of q's shape", out)
    expect(pool.dim() == 6, "pool", "[2, layers, blocks, block_size, heads, dim]", pool)
    expect(k.shape[1:] == pool.shape[4:] and v.shape == k.shape, "k, v", "the pool's heads", k)


def write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    plan: torch.Tensor,
    layer: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Write the new tokens' keys and values into a layer of the pool, then attend; one operator.

    q            [T, num_q_heads, head_dim]
    k, v         [T, num_kv_heads, head_dim], any strides
    pool, scales ``KVPool.data`` and ``KVPool.scales``: the layer's slots of this step are changed
    plan         ``number_of`` the step's plan, int64 [1] on the CPU
    return       [T, num_q_heads, head_dim] contiguous, q's dtype and device

    Options as in ``paged_attention``. Traced by torch.compile and torch.export without a break.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.radixkv.paged_attention(
        q, k, v, pool, scales, out, plan, layer, scale, sliding_window, soft_cap, sinks,
        alibi_slopes, backend,
    )  # fmt: skip
    return out
