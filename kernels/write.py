"""Puts the keys and values of new tokens into their slots; knows slots, nothing of sequences."""

import torch

from radixkv.kernels import native_write
from radixkv.kernels.checks import expect, expect_inside
from radixkv.kernels.dispatch import runs_on_triton
from radixkv.kernels.quant import LIMIT, quantise, stored


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Store token ``t`` at slot ``slots[t]`` of one layer, in place.

    k, v          [T, num_kv_heads, head_dim], any strides, any float dtype (cast to the pool's)
    *_pool_layer  [num_blocks, block_size, num_kv_heads, head_dim] contiguous
    slots         [T] int64 = block * block_size + offset, distinct, on the pool's device
    *_scales      [num_blocks, block_size, num_kv_heads] float32 contiguous, of a quantised pool
                  (``pool.k_scales[layer]``): written with the codes, as ``quant`` says

    Moves 2 * T * num_kv_heads * head_dim elements. A slot outside the pool is an IndexError on the
    CPU, before anything is written. On a GPU, where looking would synchronise, its token is
    dropped: a captured graph pads its batch with slot -1.
    """
    expect(k.shape[1:] == k_pool_layer.shape[2:], "k", f"[T, *{k_pool_layer.shape[2:]}]", k)
    expect(v.shape == k.shape, "v", f"of k's shape {tuple(k.shape)}", v)
    expect(slots.shape == k.shape[:1], "slots", f"[{len(k)}]", slots)
    check_scales(k_pool_layer, "k_scales", k_scales)
    check_scales(v_pool_layer, "v_scales", v_scales)
    if native_write.supports(k, v, k_pool_layer, v_pool_layer, slots):
        native_write.write_native(k, v, k_pool_layer, v_pool_layer, slots)
    elif runs_on_triton(k_pool_layer):
        from radixkv.kernels.triton_write import write_triton

        write_triton(k, v, k_pool_layer, v_pool_layer, slots, k_scales, v_scales)
    else:
        write_torch(k, v, k_pool_layer, v_pool_layer, slots, k_scales, v_scales)


def write_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Write as ``write_kv`` says, with torch's own operators: the reference of the kernels."""
    expect_inside("slots", slots, k_pool_layer.shape[0] * k_pool_layer.shape[1])
    for new, layer, scales in ((k, k_pool_layer, k_scales), (v, v_pool_layer, v_scales)):
        if scales is None:
            codes = new.to(layer.dtype)
        else:
            codes, scale = quantise(new, layer.dtype)
            scales.flatten(0, 1).index_copy_(0, slots, scale)
        stored(layer).flatten(0, 1).index_copy_(0, slots, stored(codes))


def check_scales(layer: torch.Tensor, name: str, scales: torch.Tensor | None) -> None:
    """Say which scales are wrong: a quantised layer needs its own, another has none."""
    if layer.dtype not in LIMIT:
        expect(scales is None, name, f"None for a pool of {layer.dtype}", scales)
        return
    like = scales is not None and scales.dtype == torch.float32 and scales.is_contiguous()
    like = like and scales is not None and scales.shape == layer.shape[:3]
    expect(like, name, f"contiguous float32 {tuple(layer.shape[:3])}", scales)
