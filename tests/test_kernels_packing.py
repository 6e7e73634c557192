"""Packed products: what torch computes, and a row's bits whatever its company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.native import unavailable_reason
from radixkv.kernels.packing import Arena, pack, pack_gated, panel_width

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no C compiler")


def _weight(out: int, given_in: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out, given_in, generator=generator).to(dtype)


def _rows(n: int, width: int) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n))


@settings(max_examples=60, deadline=None)
@given(
    out=st.integers(1, 150),
    width=st.integers(1, 600),
    rows=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    bias=st.booleans(),
)
def test_a_product_is_what_torch_computes_in_float64(
    out: int, width: int, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    weight, x = _weight(out, width, dtype), _rows(rows, width)
    added = _rows(1, out)[0] if bias else None
    packed = pack(weight, added, in_features=width + width % 2)
    given_x = torch.nn.functional.pad(x, (0, width % 2))
    wanted = torch.nn.functional.linear(
        x.double(), weight.double(), None if added is None else added.double()
    )
    # Rounding grows with the root of the length, in units of the summands' sizes (Higham and Mary,
    # "A new approach to probabilistic rounding error analysis", 2019).
    sizes = x.double().abs() @ weight.double().abs().T + (0 if added is None else added.abs())
    error = (packed.multiply(given_x).double() - wanted).abs()
    assert bool((error <= 4 * (width + 1) ** 0.5 * 2.0**-24 * sizes).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_depend_on_no_other_row(dtype: torch.dtype, threads: int) -> None:
    """DETERM-1: alone, in any batch and on any number of threads, a row's sums are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = pack(_weight(333, 700, dtype))
        x = _rows(300, 700)
        whole = packed.multiply(x)
        for first, last in [(0, 1), (5, 7), (17, 20), (31, 40), (100, 113), (2, 299)]:
            assert torch.equal(packed.multiply(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)
    torch.set_num_threads(1)
    try:
        assert torch.equal(packed.multiply(x), whole)
    finally:
        torch.set_num_threads(before)


def test_float32_weights_that_are_bfloat16_take_half_the_memory_and_give_the_same_bits() -> None:
    exact = _weight(64, 96, torch.bfloat16).float()
    other = exact.clone()
    other[0, 0] += 2.0**-20
    small, large = pack(exact), pack(other)
    assert small.stored == torch.bfloat16 and large.stored == torch.float32
    assert 2 * small.data.nbytes == large.data.nbytes
    x = _rows(9, 96)
    assert torch.equal(small.multiply(x)[:, 1:], large.multiply(x)[:, 1:])


def test_gated_weights_alternate_by_panels_and_padding_is_zero() -> None:
    gate, up = _weight(20, 32, torch.float32, 1), _weight(20, 32, torch.float32, 2)
    packed = pack_gated(gate, up)
    width = panel_width()
    assert packed.out_features == 2 * -(-20 // width) * width
    x = _rows(3, 32)
    panels = packed.multiply(x).view(3, -1, 2, width)
    for i, weight in enumerate((gate, up)):
        flat = panels[:, :, i].reshape(3, -1)
        torch.testing.assert_close(flat[:, :20], x @ weight.T, rtol=1e-5, atol=1e-5)
        assert not flat[:, 20:].any()


def test_an_arena_gives_zeroed_and_aligned_memory_that_outlives_it() -> None:
    arena = Arena()
    parts = [arena.take(n) for n in (1, 100, 65 << 20, 7)]
    del arena
    for part in parts:
        assert part.data_ptr() % 64 == 0 and not part.any()
    parts[0].fill_(1)
    assert not parts[1].any() and not parts[3].any()


def test_what_does_not_fit_is_named() -> None:
    packed = pack(_weight(8, 16, torch.float32))
    with pytest.raises(ValueError, match=r"x must be \[\*, 16\]"):
        packed.multiply(torch.zeros(2, 15))
    with pytest.raises(ValueError, match="float32"):
        packed.multiply(torch.zeros(2, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match="weight must be float32 or bfloat16"):
        pack(torch.zeros(4, 4, dtype=torch.float16))
