"""The one call for attention over the pool; knows which backend to ask, and no arithmetic."""

import functools
import importlib.util
from typing import Literal, get_args

import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.cpu import paged_attention_torch
from radixkv.kernels.dequantised import dequantised
from radixkv.kernels.features import Features
from radixkv.kernels.native import load_library, unavailable_reason
from radixkv.kernels.plan import AttentionPlan

Backend = Literal["auto", "reference", "torch", "native", "triton"]


def choose_backend(device: torch.device) -> Backend:
    """Name the backend that "auto" means on a device; the first call may compile for seconds."""
    return _choose(device.type)


@functools.cache
def _choose(device_type: str) -> Backend:
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    if device_type == "cpu" and unavailable_reason() is None:
        return "native"
    return "torch"


def paged_attention(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each new token to the keys 0..its own position of its sequence, through the tables.

    q             [T, num_q_heads, head_dim] packed as the plan says, T = plan.num_tokens
    *_pool_layer  [num_blocks, block_size, num_kv_heads, head_dim] contiguous; the new tokens' keys
                  and values are already written. num_q_heads is a multiple of num_kv_heads: query
                  head h reads key head h // (num_q_heads // num_kv_heads)
    sinks, alibi_slopes  [num_q_heads] float
    *_scales      [num_blocks, block_size, num_kv_heads] float32, of a pool of int8 or float8
    out           [T, num_q_heads, head_dim] contiguous, filled and returned; None: a new one
    return        [T, num_q_heads, head_dim], q's dtype and device

    See ``Features`` for the options. Blocks that no table names and slots past a sequence's length
    are never part of the result, whatever they hold.
    """
    _check(q, k_pool_layer, v_pool_layer, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        like = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        expect(like, "out", f"contiguous {tuple(q.shape)} {q.dtype}", out)
    features = Features(scale, sliding_window, soft_cap, sinks, alibi_slopes)
    if backend == "auto":
        backend = choose_backend(q.device)
    if k_scales is not None and v_scales is not None and backend != "triton":
        pools = (k_pool_layer, v_pool_layer)
        k_pool_layer, v_pool_layer, plan = dequantised(*pools, k_scales, v_scales, plan)
    if backend in ("torch", "native"):
        native = backend == "native"
        if native:
            expect(q.device.type == "cpu", "q", "on the CPU for the native backend", q)
            load_library()
        pools = (k_pool_layer, v_pool_layer)
        return paged_attention_torch(q, *pools, plan, features, native=native, out=out)
    if backend == "triton":
        _need_triton()
        from radixkv.kernels.triton_attention import paged_attention_triton

        return paged_attention_triton(
            q, k_pool_layer, v_pool_layer, plan, features, k_scales, v_scales, out=out
        )
    if backend == "reference":
        from radixkv.kernels.reference import paged_attention_reference

        return out.copy_(paged_attention_reference(q, k_pool_layer, v_pool_layer, plan, features))
    raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")


def _check(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, plan: AttentionPlan
) -> None:
    """Say which argument is wrong; in every layer of every step, so cheap when none is."""
    pool_shape = k_pool.shape
    if (
        q.dim() == 3
        and len(pool_shape) == 4
        and v_pool.shape == pool_shape
        and k_pool.is_contiguous()
        and v_pool.is_contiguous()
        and q.shape[0] == plan.num_tokens
        and pool_shape[1] == plan.block_size
        and q.shape[2] == pool_shape[3]
        and q.shape[1] % pool_shape[2] == 0
    ):
        return
    expect(q.dim() == 3, "q", "[T, num_q_heads, head_dim]", q)
    expect(len(q) == plan.num_tokens, "q", f"of the plan's {plan.num_tokens} rows", q)
    expect(k_pool.dim() == 4 and k_pool.is_contiguous(), "k_pool_layer", "contiguous, 4-d", k_pool)
    like = v_pool.shape == pool_shape and v_pool.is_contiguous()
    expect(like, "v_pool_layer", f"contiguous, of shape {tuple(pool_shape)}", v_pool)
    size = plan.block_size
    expect(pool_shape[1] == size, "k_pool_layer", f"of block size {size}", k_pool)
    expect(q.shape[2] == pool_shape[3], "q", f"of head_dim {pool_shape[3]}", q)
    expect(q.shape[1] % pool_shape[2] == 0, "q", f"of a multiple of {pool_shape[2]} heads", q)


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            "the triton backend needs the package 'triton', which is not installed here; "
            "use backend='torch'"
        )
