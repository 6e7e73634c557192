"""The canonical encoding: one value, one byte string, in every process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.identity.canonical import encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def same(a: object, b: object) -> bool:
    """Equal, and of the same types all the way down (1, 1.0 and True are three values)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b)  # tells 0.0 from -0.0


@given(plain, plain)
def test_encodings_are_equal_exactly_when_the_values_are(a: object, b: object) -> None:
    assert (encode(a) == encode(b)) == same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        (0, None),
        ("", None),
        ("a", b"a"),
        (["a", "b"], ["ab"]),
        ([["a"], "b"], [["a", "b"]]),
        ({"a": None}, {}),
        ([], {}),
        ({1: 2}, {"1": 2}),
        (10**30, str(10**30)),
    ],
)
def test_values_that_look_alike_are_told_apart(a: object, b: object) -> None:
    """HASH-4: tags and lengths, so that no two shapes run together."""
    assert encode(a) != encode(b)


def test_the_order_of_a_mapping_does_not_matter() -> None:
    assert encode({"a": 1, "b": [2], 3: 4}) == encode({3: 4, "b": [2], "a": 1})
    assert encode({"x", "y"}) == encode({"y", "x"})


def test_records_of_other_names_or_fields_differ() -> None:
    @dataclass
    class A:
        x: int

    @dataclass
    class B:
        x: int

    @dataclass
    class C:
        y: int

    assert len({encode(A(1)), encode(B(1)), encode(C(1)), encode({"x": 1})}) == 4


def test_what_cannot_be_encoded_is_named() -> None:
    with pytest.raises(TypeError, match="complex"):
        encode([1j])


def test_another_process_writes_the_same_bytes() -> None:
    """HASH-3."""
    program = (
        "from radixkv.identity.canonical import encode\n"
        "print(encode({'b': [1, 2.5, None, True], 'a': {'x': b'y'}, 'c': {'s', 't'}}).hex())"
    )
    mine = encode({"c": {"t", "s"}, "a": {"x": b"y"}, "b": [1, 2.5, None, True]}).hex()
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == mine
