"""Linear layers for one or two rows on the CPU: a small step's products, nearer to memory's speed.

Knows tensors and how many rows are few; nothing of models.
"""

import ctypes

import torch

from radixkv.kernels.native import load_library, unavailable_reason

FEW_ROWS = 2
"""Up to so many rows the compiled kernel is used; more are torch's."""

_SMALL = 1 << 16
"""Weights below which a second thread costs more than it brings."""


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "in_features", "out_features")),
        *((name, ctypes.c_int64) for name in ("x_stride", "num_threads")),
    ]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does. Without autograd.

    x       [..., in_features]
    weight  [out_features, in_features]
    bias    [out_features] or None

    On the CPU, in float32 and for at most FEW_ROWS rows, reads each weight once with as many
    threads as torch uses; everything else goes to torch.
    """
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= FEW_ROWS or not _supports(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    call = _Linear(
        flat.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.shape[1],
        weight.shape[0],
        flat.stride(0),
        torch.get_num_threads() if weight.numel() > _SMALL else 1,
    )
    load_library().radixkv_linear(ctypes.byref(call))
    return out


def _supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == weight.shape[1]
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and unavailable_reason() is None
    )
