"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from radixkv.service.engine.stop_strings import StopMatcher


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
)
def test_matches_and_what_is_held_do_not_depend_on_the_pieces(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        found = matcher.feed(piece, armed=True)
        text += piece
        ends = [i for i in range(len(text) + 1) if text[:i].endswith(stops)]
        if found or ends:
            assert found is not None and found.end == ends[0]
            assert text[found.start : found.end] == found.stop
            assert found.stop == max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
            return
        heads = [stop[:i] for stop in stops for i in range(len(stop))]
        assert matcher.held == max(len(head) for head in heads if text.endswith(head))


def test_a_long_stop_string_that_nearly_matches_over_and_over_costs_no_second_look() -> None:
    """Its work is counted in characters, however much of the stop string they match."""

    class Counted(str):
        looks = 0

        def __getitem__(self, key: Any) -> str:
            Counted.looks += 1
            return super().__getitem__(key)

    stop = Counted("a" * 500 + "b")
    matcher = StopMatcher((stop,))
    Counted.looks = 0
    for _ in range(20):
        assert matcher.feed("a" * 499 + "c", armed=True) is None
    assert Counted.looks < 4 * 20 * 500
    assert matcher.feed("a" * 700 + "b", armed=True) is not None
