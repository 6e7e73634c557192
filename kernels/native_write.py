"""Calls the compiled write kernel; knows how tensors become pointers and strides."""

import ctypes

import torch

from radixkv.kernels.native import load_library, unavailable_reason


class _Write(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k_pool", "v_pool", "k", "v", "slots")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_slots", "num_heads")),
        *((name, ctypes.c_int64) for name in ("head_bytes", "k_row", "k_head", "v_row", "v_head")),
    ]


def supports(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
) -> bool:
    """Whether the kernel is there and the tensors are on the CPU, of one type, with dense heads."""
    return (
        k.device.type == "cpu"
        and k.dtype == v.dtype == k_pool_layer.dtype
        and k.stride(2) == v.stride(2) == 1
        and slots.dtype == torch.int64
        and slots.is_contiguous()
        and k_pool_layer.is_contiguous()
        and v_pool_layer.is_contiguous()
        and unavailable_reason() is None
    )


def write_native(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write as ``write_kv`` says. Raises IndexError, with nothing written, for a slot too far."""
    num_blocks, block_size, num_heads, head_dim = k_pool_layer.shape
    size = k.element_size()
    call = _Write(
        k_pool_layer.data_ptr(),
        v_pool_layer.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        slots.data_ptr(),
        len(k),
        num_blocks * block_size,
        num_heads,
        head_dim * size,
        k.stride(0) * size,
        k.stride(1) * size,
        v.stride(0) * size,
        v.stride(1) * size,
    )
    bad = load_library().radixkv_write(ctypes.byref(call))
    if bad >= 0:
        raise IndexError(f"slots[{bad}] is outside the pool's {num_blocks * block_size} slots")
