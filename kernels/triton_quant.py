"""The arithmetic of ``quant`` as functions for Triton kernels, with the same bits on every target.

The type of what a kernel loads says what it is: int8, or uint8 for e4m3fn (a float8 pool goes in as
``quant.stored``), or a float type, which needs no scale.
"""

import triton
import triton.language as tl

from radixkv.kernels import quant

SMALLEST_PEAK = tl.constexpr(quant.SMALLEST_PEAK)


@triton.jit
def to_values(raw, dtype: tl.constexpr):
    """Turn what a pool holds into ``dtype``, exactly, and without the scale.

    Every code is a number of at most 8 bits, so fp16 and bf16 hold it without rounding.
    """
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.uint16)
        # An fp16 has the same fields, more bits, and an exponent that is 8 less.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return raw.to(dtype)


@triton.jit
def quantise_rows(x, code: tl.constexpr):
    """Quantise the rows of x, float32 [R, D]: codes [R, D] of type ``code``, scales [R].

    For ``quant.quantise``'s bits the launch needs ``enable_fp_fusion=False``.
    """
    limit: tl.constexpr = 127.0 if code == tl.int8 else 448.0
    magnitude = tl.abs(x)
    # A maximum may or may not take NaN over, a comparison says.
    finite = tl.min((magnitude < float("inf")).to(tl.int32), 1) == 1
    peak = tl.maximum(tl.max(magnitude, 1), SMALLEST_PEAK)
    scale = tl.where(finite, peak * (1.0 / limit), float("nan"))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    codes = _nearest_int(scaled) if code == tl.int8 else _nearest_e4m3(scaled)
    return codes.to(code), scale


@triton.jit
def _nearest_int(x):
    # Added to 1.5 * 2**23 a small number is rounded to an integer, which the low bits then are.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _nearest_e4m3(x):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # To even: half a unit less one, and the last bit that stays, decide whether it carries.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is the unit in the last place of 2**14.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
