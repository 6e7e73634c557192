"""Sequences that another begins with: found as a look at each would find them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.prefixes import Prefixes
from radixkv.tokens import encode

texts = st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), max_size=6).map(encode)


@given(st.lists(texts, max_size=12), st.lists(st.integers(0, 11), max_size=6), texts)
def test_it_finds_what_a_look_at_each_finds_the_longest_first(
    put: list[bytes], dropped: list[int], query: bytes
) -> None:
    prefixes: Prefixes[int] = Prefixes()
    kept = dict(enumerate(put))
    for number, text in kept.items():
        prefixes.put(text, str(number), number)
    for number in dropped:
        if number in kept:
            prefixes.drop(kept.pop(number), str(number))
    assert len(prefixes) == len(kept)
    found = list(prefixes.beginning(query))
    expected = [n for n, text in kept.items() if query.startswith(text)]
    assert sorted(found) == sorted(expected)
    lengths = [len(kept[n]) for n in found]
    assert lengths == sorted(lengths, reverse=True)


def test_many_that_branch_off_one_stem_are_not_looked_at_one_by_one() -> None:
    """The number of steps is that of those that match and of branchings, not of all."""

    class Counted(bytes):
        looks = 0

        def __gt__(self, other: bytes) -> bool:  # asked first, whatever it is compared with
            Counted.looks += 1
            return bytes.__gt__(self, other)

    stem = encode(range(100))
    prefixes: Prefixes[int] = Prefixes()
    for i in range(1000):
        prefixes.put(Counted(stem + encode([1000 + i] * 3)), str(i), i)
    prefixes.put(Counted(stem), "stem", -1)
    Counted.looks = 0
    assert list(prefixes.beginning(stem + encode([1500, 1500, 1500, 7]))) == [500, -1]
    assert 0 < Counted.looks < 60
