"""New tokens reach their slots, and nothing else changes."""

import pytest
import torch

from radixkv.kernels.quant import quantise
from radixkv.kernels.write import write_kv
from tests.kernel_cases import random_pool
from tests.moves_cases import Shape, assert_same_bits, moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    pool = random_pool(dtype=dtype)
    before = pool.data.clone()
    # Transposed, as a model's heads come: [heads, T, dim] seen as [T, heads, dim].
    k = torch.randn(3, 5, 8).transpose(0, 1)
    v = torch.randn(3, 5, 8).transpose(0, 1)
    slots = torch.tensor([23, 0, 7, 8, 13])
    write_kv(k, v, pool.k[1], pool.v[1], slots)
    expected = before.clone()
    for t, slot in enumerate(slots.tolist()):
        expected[0, 1, slot // 4, slot % 4] = k[t].to(dtype)
        expected[1, 1, slot // 4, slot % 4] = v[t].to(dtype)
    assert torch.equal(pool.data, expected)


def test_writing_no_token_is_allowed_and_wrong_shapes_are_named() -> None:
    pool = random_pool()
    none = torch.empty(0, 3, 8)
    write_kv(none, none, pool.k[0], pool.v[0], torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots"):
        write_kv(none, none, pool.k[0], pool.v[0], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="k must"):
        write_kv(none[:, :2], none[:, :2], pool.k[0], pool.v[0], torch.zeros(0).long())


def test_a_slot_outside_the_pool_is_refused_before_anything_is_written() -> None:
    pool = random_pool()
    before = pool.data.clone()
    new = torch.randn(2, 3, 8)
    for slot in (24, -1):
        with pytest.raises(IndexError):
            write_kv(new, new, pool.k[0], pool.v[0], torch.tensor([0, slot]))
        assert torch.equal(pool.data[:, :, 1:], before[:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_pool_takes_codes_and_scales_and_leaves_the_rest(dtype: torch.dtype) -> None:
    pool = Shape(2, 6, 4, 3, 8, dtype, seed=0).pool()
    expected = moved(pool, "cpu")
    assert expected.scales is not None
    k, v = torch.randn(2, 3, 5, 8).bfloat16().transpose(1, 2)
    slots = torch.tensor([23, 0, 7, 8, 13])
    write_kv(k, v, pool.k[1], pool.v[1], slots, pool.k_scales[1], pool.v_scales[1])
    for t, slot in enumerate(slots.tolist()):
        for half, new in enumerate((k, v)):
            at = (half, 1, slot // 4, slot % 4)
            codes, expected.scales[at] = quantise(new[t], dtype)
            expected.data.view(torch.uint8)[at] = codes.view(torch.uint8)
    assert_same_bits(pool, expected)


def test_scales_are_wanted_by_a_quantised_pool_and_by_no_other() -> None:
    plain, quantised = random_pool(), Shape(1, 6, 4, 3, 8, torch.int8, seed=0).pool()
    new, slots = torch.randn(1, 3, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="k_scales must be contiguous float32"):
        write_kv(new, new, quantised.k[0], quantised.v[0], slots)
    scales = quantised.k_scales[0]
    with pytest.raises(ValueError, match="v_scales must be contiguous float32"):
        write_kv(new, new, quantised.k[0], quantised.v[0], slots, scales)
    with pytest.raises(ValueError, match="k_scales must be None"):
        write_kv(new, new, plain.k[0], plain.v[0], slots, scales)


@pytest.mark.parametrize("slot", [24, -1])
def test_a_slot_outside_a_quantised_pool_is_refused_too(slot: int) -> None:
    pool = Shape(1, 6, 4, 3, 8, torch.int8, seed=0).pool()
    before = moved(pool, "cpu")
    new = torch.randn(2, 3, 8)
    with pytest.raises(IndexError):
        write_kv(new, new, pool.k[0], pool.v[0], torch.tensor([0, slot]),
                 pool.k_scales[0], pool.v_scales[0])  # fmt: skip
    assert_same_bits(pool, before)
