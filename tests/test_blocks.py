"""The block pool: what is free is not referenced, and the other way round."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.blocks import BlockPool
from radixkv.errors import OutOfBlocks


def test_a_fresh_pool_deals_consecutive_blocks() -> None:
    pool = BlockPool(10)
    assert pool.take(4).tolist() == [0, 1, 2, 3]
    assert pool.take(2).tolist() == [4, 5]


def test_what_comes_back_is_dealt_again_in_the_same_order() -> None:
    pool = BlockPool(10)
    ids = pool.take(4)
    pool.drop(ids)
    assert pool.take(4).tolist() == ids.tolist()


def test_too_much_is_refused_whole_and_says_how_much_there_was() -> None:
    pool = BlockPool(4)
    pool.take(3)
    with pytest.raises(OutOfBlocks) as e:
        pool.take(2)
    assert (e.value.need, e.value.free) == (2, 1)
    assert pool.free == 1 and pool.check() == []


def test_a_block_is_free_when_the_last_reference_goes() -> None:
    pool = BlockPool(4)
    ids = pool.take(2)
    pool.share(ids)
    assert pool.drop(ids) == 0
    assert pool.drop(ids) == 2
    assert pool.free == 4 and pool.referenced == 0


def test_many_are_counted_as_few_are() -> None:
    pool = BlockPool(200)
    ids = pool.take(100)
    pool.share(ids[:50])
    assert pool.drop(ids) == 50 and pool.free == 150
    assert pool.check() == []
    with pytest.raises(ValueError, match="free block"):
        pool.drop(ids)
    assert pool.counts[ids].tolist() == [1] * 50 + [0] * 50
    assert pool.drop(ids[:50]) == 50 and pool.take(200).tolist() != []
    assert pool.reset() == 200
    assert pool.take(3).tolist() == [0, 1, 2] and pool.check() == []


def test_giving_back_twice_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4)
    ids = pool.take(2)
    pool.drop(ids[:1])
    with pytest.raises(ValueError, match="free block"):
        pool.drop(ids)
    assert pool.counts.tolist() == [0, 1, 0, 0] and pool.check() == []


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="free block"):
        pool.share(array("i", [1]))


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0)


def test_a_broken_account_is_put_in_words() -> None:
    """LEAK-2: reported, not raised."""
    pool = BlockPool(4)
    pool.take(2)
    pool.counts[0] = 0
    assert pool.check() == ["2 free + 1 referenced != 4 blocks"]
    pool.counts[0], pool.counts[3] = 1, 1
    assert any("free and referenced" in line for line in pool.check())
    pool.counts[3] = -1
    assert any("negative" in line for line in pool.check())


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "one"]), st.integers(0, 6))))
def test_any_order_of_operations_keeps_the_account(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    held: list[int] = []  # a block once for each reference
    for what, n in steps:
        if what == "take" and n <= pool.free:
            held += pool.take(n).tolist()
        elif what == "one" and pool.free:
            held.append(pool.take(1)[0])
        elif what == "share" and held:
            some = sorted(set(held))[:n]
            pool.share(array("i", some))
            held += some
        elif what == "drop":
            some = sorted(set(held))[:n]
            pool.drop(array("i", some))
            for block in some:
                held.remove(block)
        assert pool.check() == []
        assert pool.counts.tolist() == [held.count(b) for b in range(12)]
