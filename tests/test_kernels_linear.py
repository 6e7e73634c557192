"""The product for few rows equals torch's, for any shape and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.linear import FEW_ROWS, linear


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, FEW_ROWS + 2),
    in_features=st.integers(1, 70),
    out_features=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_it_is_the_linear_layer_for_any_shape(
    rows: int, in_features: int, out_features: int, bias: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, rows, in_features, generator=random)
    weight = torch.randn(out_features, in_features, generator=random)
    b = torch.randn(out_features, generator=random) if bias else None
    got = linear(x, weight, b)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert got.shape == (1, rows, out_features)
    torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_weights_are_shared_between_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(2, 576), torch.randn(1001, 576)
        torch.testing.assert_close(linear(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_views_with_gaps_between_rows_and_columns_are_read_right() -> None:
    wide = torch.randn(2, 200)
    weight = torch.randn(17, 64)
    for x in (wide[:, 100:164], wide[:, ::3][:, :64], torch.randn(64, 2).T):
        torch.testing.assert_close(linear(x, weight), x @ weight.T, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_go_to_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, 32, dtype=dtype), torch.randn(8, 32, dtype=dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_wrong_shapes_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError):
        linear(torch.randn(1, 8), torch.randn(4, 9))
