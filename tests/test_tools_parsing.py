"""Calls are found in answers, what is no call is text, and it does not matter how text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.tools_formats import FORMATS, FormatName, ToolFormat, format_of
from radixkv.service.tools_parsing import parse
from radixkv.service.tools_pieces import (
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    Piece,
    Text,
    ToolCall,
    joined,
)
from tests.tool_cases import NAMES, calls, cut, layouts, written

cuts = st.lists(st.integers(0, 10_000), max_size=12)
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{",
    "}", "[", "]", '"name": ', '"add"', ', "arguments": ', ', "parameters": ', '{"a": 1}', "\n",
    " ", ",", ";", ":", '"', "\\", "add", "<tool_", "[TOOL", "null", "é",
    '{"name": "add", "arguments": {}}', '{"name": "add", "parameters": {"x": "}"}}',
)  # fmt: skip
answers = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text(max_size=30)


def how_of(name: FormatName) -> ToolFormat:
    found = format_of(None, name)
    assert found is not None
    return found


def said(name: FormatName, pieces: list[str]) -> list[Piece]:
    parser = how_of(name).parser(NAMES)
    found = [piece for text in pieces for piece in parser.push(text)]
    return found + parser.close()


def told(pieces: list[Piece]) -> list[Any]:
    """What a client is told in the end: neighbouring texts and arguments joined."""
    found: list[Any] = []
    for piece in pieces:
        match piece, found[-1:]:
            case Text(text), [("text", before)]:
                found[-1] = ("text", before + text)
            case Text(text), _:
                found.append(("text", text))
            case CallArguments(index, text), [("arguments", at, before)] if at == index:
                found[-1] = ("arguments", index, before + text)
            case CallArguments(index, text), _:
                found.append(("arguments", index, text))
            case _:
                found.append(piece)
    return found


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(made=calls, layout=layouts, at=cuts)
def test_calls_are_found_as_they_were_written(
    name: FormatName, made: list[tuple[str, Any]], layout: Any, at: list[int]
) -> None:
    text = written(name, made, layout)
    answer = joined(said(name, cut(text, at)))
    assert answer.text == ""
    found = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    assert found == made
    assert all(call.arguments in text for call in answer.calls)  # letter for letter


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(text=answers, at=cuts)
def test_any_cut_of_an_answer_says_the_same(name: FormatName, text: str, at: list[int]) -> None:
    whole = told(said(name, [text]))
    assert told(said(name, cut(text, at))) == whole
    assert told(said(name, list(text))) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(text=answers)
def test_nothing_of_an_answer_is_lost_but_white_space_and_marks_around_calls(
    name: FormatName, text: str
) -> None:
    answer = parse(how_of(name).parser(NAMES), text)
    if not answer.calls and not (name == "llama3_json" and "python_tag" in text):
        assert answer.text == text
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(made=calls, layout=layouts, at=cuts, end=st.integers(0, 10_000))
def test_an_answer_that_is_cut_off_has_its_whole_calls_and_the_rest_as_text(
    name: FormatName, made: list[tuple[str, Any]], layout: Any, at: list[int], end: int
) -> None:
    text = written(name, made, layout)
    text = text[: end % (len(text) + 1)]
    pieces = said(name, cut(text, at))
    answer = joined(pieces)
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == made[: len(answer.calls)]
    starts = [piece.index for piece in pieces if isinstance(piece, CallStart)]
    ends = [piece.index for piece in pieces if isinstance(piece, CallEnd)]
    assert starts == ends == list(range(len(starts)))  # what begins ends, in order


def test_a_name_is_said_first_and_arguments_as_they_come() -> None:
    parser = how_of("hermes").parser(NAMES)
    assert parser.push("Let me see.\n<tool") == [Text("Let me see.")]
    assert parser.push('_call>\n{"name": "ad') == []
    assert parser.push('d", "argu') == []
    assert parser.push('ments": {"a": ') == [CallStart(0, "add"), CallArguments(0, '{"a": ')]
    assert parser.push("12") == [CallArguments(0, "12")]
    last = parser.push("}}\n</tool_call>")
    assert last[0] == CallArguments(0, "}")
    assert isinstance(last[1], CallEnd) and last[1].whole
    assert parser.close() == []


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = how_of("hermes").parser(NAMES)
    assert parser.push('<tool_call>{"arguments": {"a": 1}, "name": ') == []
    assert parser.push('"add"')[:2] == [CallStart(0, "add"), CallArguments(0, '{"a": 1}')]


@pytest.mark.parametrize(
    "name, text, answer",
    [
        ("hermes", "Hi <b> there ", Answer("Hi <b> there ")),
        ("hermes", '<tool_call>{"name": "f"}', Answer("", (ToolCall("f", "{}"),))),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            Answer("", (ToolCall("f", '{"a": 1}'),)),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": null}</tool_call> Done.',
            Answer(" Done.", (ToolCall("f", "{}"),)),
        ),
        (
            "hermes",
            '<tool_call>\n[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n'
            "</tool_call>",
            Answer("", (ToolCall("f", "{}"), ToolCall("g", "{}"))),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None),
        ("hermes", "a <tool_call> is written <tool_call>so</tool_call>", None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> x', None),
        (
            "hermes",
            '<tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            Answer("<tool_call>\n", (ToolCall("f", "{}"),)),
        ),
        (
            "mistral",
            'Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]a.b-c[CALL_ID]x1[ARGS]{}',
            Answer("Well.", (ToolCall("add", '{"a": 1}'), ToolCall("a.b-c", "{}"))),
        ),
        ("mistral", "[TOOL_CALLS]what a {name}", None),
        ("mistral", "[TOOL_CALLS] nothing", None),
        ("llama3_json", '{"name": "nobody", "parameters": {}}', None),
        ("llama3_json", '{"name": "add"}', None),
        ("llama3_json", 'Here: {"name": "add", "parameters": {}}', None),
        ("llama3_json", '[{"name": "add", "parameters": {}}]', None),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {}}',
            Answer("", (ToolCall("add", "{}"),)),
        ),
    ],
)
def test_what_models_write_instead(name: FormatName, text: str, answer: Answer | None) -> None:
    """None: no call, so all of it is text."""
    assert parse(how_of(name).parser(NAMES), text) == (answer or Answer(text))


def test_a_call_that_breaks_in_its_arguments_has_ended_and_is_not_whole() -> None:
    pieces = said("hermes", ['<tool_call>{"name": "f", "arguments": {"a": ', "oops}}"])
    assert pieces[:2] == [CallStart(0, "f"), CallArguments(0, '{"a": ')]
    assert pieces[2] == CallEnd(0, False, '<tool_call>{"name": "f", "arguments": {"a": ')
    assert joined(pieces).text.endswith("oops}}")
