"""Copied blocks carry their valid entries, exactly, and nothing else changes."""

import pytest
import torch

from radixkv.kernels.copy import copy_blocks
from tests.kernel_cases import random_pool
from tests.moves_cases import Shape, moved


def test_a_copy_moves_the_valid_entries_of_every_layer_and_no_others() -> None:
    """COW: a private copy gets the shared entries only."""
    pool = random_pool()
    before = pool.data.clone()
    copy_blocks(pool, [0, 0, 3], [1, 5, 2], [4, 1, 0])
    expected = before.clone()
    expected[:, :, 1] = before[:, :, 0]
    expected[:, :, 5, :1] = before[:, :, 0, :1]
    assert torch.equal(pool.data, expected)


def test_every_source_is_read_before_any_target_is_written() -> None:
    pool = random_pool()
    before = pool.data.clone()
    copy_blocks(pool, [0, 1, 2], [1, 2, 0], [4, 4, 2])
    assert torch.equal(pool.data[:, :, 1], before[:, :, 0])
    assert torch.equal(pool.data[:, :, 2], before[:, :, 1])
    assert torch.equal(pool.data[:, :, 0, :2], before[:, :, 2, :2])
    assert torch.equal(pool.data[:, :, 0, 2:], before[:, :, 0, 2:])


@pytest.mark.parametrize(
    ("sources", "targets", "num_valid", "name"),
    [
        ([6], [0], [1], "sources"),
        ([0], [-1], [1], "targets"),
        ([0, 1], [2, 2], [1, 1], "distinct"),
        ([0], [1], [5], "num_valid"),
        ([0], [1, 2], [1], "as long as"),
    ],
)
def test_a_bad_copy_changes_nothing(
    sources: list[int], targets: list[int], num_valid: list[int], name: str
) -> None:
    pool = random_pool()
    before = pool.data.clone()
    with pytest.raises(ValueError, match=name):
        copy_blocks(pool, sources, targets, num_valid)
    assert torch.equal(pool.data, before)
    copy_blocks(pool, [], [], [])
    assert torch.equal(pool.data, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_travel_with_the_entries_that_are_copied(dtype: torch.dtype) -> None:
    pool = Shape(2, 6, 4, 3, 8, dtype, seed=0).pool()
    before = moved(pool, "cpu")
    copy_blocks(pool, [0, 1], [1, 5], [4, 1])
    assert pool.scales is not None and before.scales is not None
    for got, old in (
        (pool.data.view(torch.uint8), before.data.view(torch.uint8)),
        (pool.scales.view(torch.int32), before.scales.view(torch.int32)),
    ):
        expected = old.clone()
        expected[:, :, 1] = old[:, :, 0]
        expected[:, :, 5, :1] = old[:, :, 1, :1]
        assert torch.equal(got, expected)
