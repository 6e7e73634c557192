"""Keys and values of one byte: how far they may be off, and that nothing broken hides in them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.quant import LIMIT, SMALLEST_PEAK, dequantise, quantise, stored
from radixkv.kernels.write import write_kv
from tests.kernel_cases import make_case

QUANTISED = tuple(LIMIT)
SLACK = 1 + 2.0**-20


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Any finite vectors: of all magnitudes, with outliers, with zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(5, draw(st.sampled_from((1, 8, 80))), generator=generator)
    x *= 2.0 ** draw(st.integers(-140, 100))
    x[0, 0] *= draw(st.sampled_from((0.0, 1.0, 1e4)))
    x[1] *= draw(st.sampled_from((0.0, 1.0)))
    return x * torch.rand(x.shape, generator=generator).pow(draw(st.sampled_from((0, 1, 20))))


@settings(max_examples=200, deadline=None)
@given(vectors(), st.sampled_from(QUANTISED))
def test_no_value_is_off_by_more_than_the_stated_bound(x: torch.Tensor, dtype: torch.dtype) -> None:
    codes, scales = quantise(x, dtype)
    assert codes.dtype == dtype and scales.shape == x.shape[:-1]
    error = (dequantise(codes, scales).double() - x.double()).abs()
    peak = x.double().abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    if dtype == torch.int8:
        bound = (peak / 254).expand(x.shape)
    else:
        bound = torch.maximum(x.double().abs() / 16, peak / 458752)
    assert (error <= bound * SLACK).all()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_the_largest_value_gets_the_largest_code_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -6.0, 0.0], [0.0, 0.0, 0.0]])
    codes, scales = quantise(x, dtype)
    assert codes[0, 1].float() == -LIMIT[dtype]
    assert torch.equal(dequantise(codes, scales)[1], torch.zeros(3))
    torch.testing.assert_close(scales[0], torch.tensor(6.0 / LIMIT[dtype]))


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_comes_back_as_nan(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    back = dequantise(*quantise(x, dtype))
    assert back[1].isnan().all() and torch.equal(back[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_quantising_what_came_back_changes_nothing(dtype: torch.dtype) -> None:
    codes, scales = quantise(torch.randn(50, 64), dtype)
    again, scales_again = quantise(dequantise(codes, scales), dtype)
    torch.testing.assert_close(scales_again, scales, rtol=1e-6, atol=0)
    assert torch.equal(stored(again), stored(codes))


def test_a_type_that_needs_no_scales_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype must be torch.int8 or torch.float8_e4m3fn"):
        quantise(torch.ones(2), torch.float16)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.1)], ids=str
)
def test_attention_over_quantised_keys_is_close(dtype: torch.dtype, bound: float) -> None:
    """The mean error of an output, relative to the mean of its magnitude, on random keys."""
    case = make_case([1, 5], [200, 77], num_q_heads=8)
    blocks, size, heads, dim = case.k_pool.shape
    pool = KVPool.allocate(1, blocks, size, heads, dim, dtype)
    slots = torch.arange(case.k_pool.shape[0] * case.k_pool.shape[1])
    # What must not be read is NaN in the case and stays so.
    write_kv(
        case.k_pool.flatten(0, 1), case.v_pool.flatten(0, 1), pool.k[0], pool.v[0], slots,
        pool.k_scales[0], pool.v_scales[0],
    )  # fmt: skip
    assert pool.k_scales[0] is not None and pool.v_scales[0] is not None
    k, v = dequantise(pool.k[0], pool.k_scales[0]), dequantise(pool.v[0], pool.v_scales[0])
    plan: AttentionPlan = case.plan
    got = paged_attention(case.q, k, v, plan, backend="reference", **case.options)
    want = case.run("reference")
    error = (got - want).abs().mean() / want.abs().mean()
    assert 0 < error < bound
