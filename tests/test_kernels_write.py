"""New tokens reach their slots, and nothing else changes."""

import pytest
import torch

from radixkv.kernels.write import write_kv
from tests.kernel_cases import random_pool


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
