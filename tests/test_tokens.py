"""Token bytes: every kind of input that holds whole numbers, and how much two sequences share."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import tokens

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids)
def test_ids_survive_the_way_there_and_back(numbers: list[int]) -> None:
    encoded = tokens.encode(numbers)
    assert tokens.decode(encoded) == numbers
    assert tokens.count(encoded) == len(numbers)
    assert encoded == b"".join(n.to_bytes(4, "big") for n in numbers)


@given(ids, ids)
def test_the_order_of_the_bytes_is_the_order_of_the_ids(a: list[int], b: list[int]) -> None:
    assert (tokens.encode(a) < tokens.encode(b)) == (a < b)


@pytest.mark.parametrize(
    "same",
    [
        [1, 2, 70_000],
        (1, 2, 70_000),
        np.array([1, 2, 70_000]),
        np.array([1, 2, 70_000], np.uint32),
        np.array([[1, 2, 70_000]], np.int32),
        array("i", [1, 2, 70_000]),
        memoryview(array("q", [1, 2, 70_000])),
        bytearray(b"\0\0\0\1\0\0\0\2\0\1\x11\x70"),
        memoryview(b"\0\0\0\1\0\0\0\2\0\1\x11\x70"),
        (n for n in (1, 2, 70_000)),
    ],
    ids=lambda same: type(same).__name__,
)
def test_all_that_holds_whole_numbers_encodes_alike(same: object) -> None:
    assert tokens.encode(same) == b"\0\0\0\1\0\0\0\2\0\1\x11\x70"


def test_nothing_encodes_to_nothing() -> None:
    assert tokens.encode([]) == tokens.encode(np.array([])) == tokens.encode(b"") == b""


@pytest.mark.parametrize("bad", [[-1], [2**32], np.array([-1]), np.array([2**32]), b"\0\0\0"])
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="token"):
        tokens.encode(bad)


@pytest.mark.parametrize("bad", [np.array([1.0]), [1.5], ["1"]])
def test_what_is_no_whole_number_is_refused(bad: object) -> None:
    with pytest.raises(TypeError):
        tokens.encode(bad)


@given(
    st.lists(st.integers(255, 257), max_size=400),
    st.integers(0, 400),
    st.lists(st.integers(255, 257), max_size=5),
    st.integers(0, 5),
)
def test_the_common_prefix_is_the_longest(
    a: list[int], cut: int, other: list[int], start: int
) -> None:
    b = a[start : start + cut] + other
    expected = 0
    for x, y in zip(a[start:], b, strict=False):
        if x != y:
            break
        expected += 1
    assert tokens.common_prefix(tokens.encode(a), tokens.encode(b), start) == expected


def test_a_difference_in_any_token_of_a_long_sequence_is_found() -> None:
    a = tokens.encode(range(5000))
    for at in range(0, 5000, 37):
        b = a[: 4 * at + 2] + b"\xff" + a[4 * at + 3 :]
        assert tokens.common_prefix(a, b) == at
    assert tokens.common_prefix(a, a) == 5000
