"""Knows how keys and values shrink to one byte each and come back; nothing of blocks or devices.

Symmetric, with one float32 scale per head vector (slot x key head), chosen when the vector is
written and never changed: a block that fills up later is not quantised again, and a copied entry
takes its scale along.

    x = code * scale        scale = largest |x| of the vector / LIMIT

| type                | LIMIT | error of x, at most                                             |
| int8                |   127 | largest |x| / 254                                               |
| float8_e4m3fn (OCP) |   448 | |x| / 16, or largest |x| / 458752 where x is tiny beside it     |

(times 1 + 2**-20 for the arithmetic; largest |x| counts as 2**-100 at least.) A vector with a value
that is not finite comes back as all NaN, so that quantisation never hides a broken model.

The bytes are e4m3fn on every device, also where the hardware's own 8-bit type is e4m3fnuz (AMD
gfx942) or there is none (NVIDIA sm_80): the kernels convert by integer arithmetic, with the same
result everywhere, and a block that one card wrote means the same on another. float8_e4m3fnuz is no
type of a pool.
"""

import torch

from radixkv.kernels.checks import expect

LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The code that the largest magnitude of a vector gets, of each type that needs scales."""

SCALES = "float32 of each head vector, its largest magnitude over the limit"
"""What the scales of a pool are, for whoever says under which conditions blocks may be shared."""

SMALLEST_PEAK = 2.0**-100
"""Vectors smaller than this throughout are scaled as if they reached it; its inverse is finite."""


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each vector of the last dimension by itself: codes of x's shape, and scales.

    x       [..., n] any float type
    return  codes [..., n] of ``dtype``, scales [...] float32
    """
    expect(dtype in LIMIT, "dtype", " or ".join(map(str, LIMIT)), dtype)
    limit = LIMIT[dtype]
    values = x.float()
    peak = values.abs().amax(-1) if x.shape[-1] else values.new_zeros(x.shape[:-1])
    finite = peak < torch.inf  # false for NaN
    scales = torch.where(finite, peak.clamp(min=SMALLEST_PEAK) * (1.0 / limit), torch.nan)
    codes = (values * (1.0 / scales)[..., None]).clamp(-limit, limit)
    codes = torch.where(finite[..., None], codes, 0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Undo ``quantise``: codes [..., n] times scales [...], rounded once, to ``dtype``."""
    return (codes.to(torch.float32) * scales[..., None]).to(dtype)


def stored(x: torch.Tensor) -> torch.Tensor:
    """View float8 as uint8, for kernels and operators that only know bytes; others as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
