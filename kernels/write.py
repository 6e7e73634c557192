"""Puts the keys and values of new tokens into their slots; knows slots, nothing of sequences."""

import torch

from radixkv.kernels import native_write
from radixkv.kernels.checks import expect


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store token ``t`` at slot ``slots[t]`` of one layer, in place.

    k, v          [T, num_kv_heads, head_dim], any strides, any float dtype (cast to the pool's)
    *_pool_layer  [num_blocks, block_size, num_kv_heads, head_dim] contiguous
    slots         [T] int64 = block * block_size + offset, distinct, on the pool's device

    Moves 2 * T * num_kv_heads * head_dim elements. Slots are not checked on a GPU.
    """
    expect(k.shape[1:] == k_pool_layer.shape[2:], "k", f"[T, *{k_pool_layer.shape[2:]}]", k)
    expect(v.shape == k.shape, "v", f"of k's shape {tuple(k.shape)}", v)
    expect(slots.shape == k.shape[:1], "slots", f"[{len(k)}]", slots)
    if native_write.supports(k, v, k_pool_layer, v_pool_layer, slots):
        native_write.write_native(k, v, k_pool_layer, v_pool_layer, slots)
        return
    k_pool_layer.flatten(0, 1).index_copy_(0, slots, k.to(k_pool_layer.dtype))
    v_pool_layer.flatten(0, 1).index_copy_(0, slots, v.to(v_pool_layer.dtype))
