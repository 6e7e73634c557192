"""One JSON object read in pieces is the object, and has the members, that Python's reader finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.tools_json import MAX_DEPTH, ObjectReader, parsed_object
from tests.tool_cases import cut, json_objects, layouts

cuts = st.lists(st.integers(0, 10_000), max_size=12)


def read(text: str, at: list[int]) -> tuple[ObjectReader, int]:
    reader, taken = ObjectReader(), 0
    for piece in cut(text, at):
        took = reader.push(piece)
        taken += took
        if took < len(piece):
            break
    return reader, taken


@settings(max_examples=50, deadline=None)
@given(json_objects, layouts, cuts, st.text(max_size=5))
def test_an_object_ends_where_it_ends_however_it_comes(
    value: Any, layout: Any, at: list[int], after: str
) -> None:
    text = json.dumps(value, **layout)
    reader, taken = read(text + after, at)
    assert (reader.state, reader.text, taken) == ("done", text, len(text))
    members = [
        (json.loads(reader.span(m.key)), json.loads(reader.span(m.value)))
        for m in reader.members
        if m.value is not None
    ]
    assert members == list(value.items())


@settings(max_examples=50, deadline=None)
@given(json_objects, layouts, cuts, st.integers(0, 10_000), st.text(max_size=3))
def test_what_is_broken_for_python_is_broken_here_and_at_the_same_place_however_it_comes(
    value: Any, layout: Any, at: list[int], place: int, other: str
) -> None:
    text = json.dumps(value, **layout)
    place %= len(text)
    text = text[:place] + other + text[place + 1 :]
    reader, taken = read(text, at)
    whole = ObjectReader()
    assert whole.push(text) == taken and whole.state == reader.state
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert reader.state != "done"
    else:
        if isinstance(found, dict) and "NaN" not in text and "Infinity" not in text:
            assert (reader.state, taken) == ("done", end)


@pytest.mark.parametrize(
    "text",
    ["[1]", '"a"', "{a: 1}", "{'a': 1}", '{"a": 01}', '{"a": 1.}', '{"a": nul}', '{"a" 1}',
     '{"a": 1,}', '{,}', '{"a": [1,]}', '{"a": "\n"}', '{"a": "\\x"}', '{"a": "\\u12g4"}',
     '{"a": 1e999}', '{"a": 1]', '{"a": NaN}', '{"a": +1}', '{"a": {"b": 1]}', '{"a"]'],
)  # fmt: skip
def test_what_is_no_json_is_broken(text: str) -> None:
    reader = ObjectReader()
    taken = reader.push(text)
    assert reader.state == "broken" and taken < len(text)


def test_what_is_nested_too_deeply_is_broken_before_anybody_recurses() -> None:
    for depth, state in ((MAX_DEPTH, "done"), (MAX_DEPTH + 1, "broken")):
        reader = ObjectReader()
        reader.push('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
        assert reader.state == state


@pytest.mark.parametrize(
    "text, value",
    [
        (r'{"a": [1.5, "\u00e9"]}', {"a": [1.5, "é"]}),
        ("[]", None),
        ("{", None),
        ('{"a": 1e999}', None),
        ('{"a": NaN}', None),
        (r'{"a": "\ud800"}', None),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        ('{"a": ' + "1" * 5000 + "}", None),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", None),
    ],
)
def test_only_what_can_be_written_again_counts_as_an_object(text: str, value: Any) -> None:
    assert parsed_object(text) == value
