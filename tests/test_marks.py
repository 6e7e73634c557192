"""Breakpoints: which are found in a chat, how long they live, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.boundaries import Cut
from radixkv.service.http.anthropic_schema import MessagesRequest, chat_of
from radixkv.service.http.body import parse_body
from radixkv.service.http.marks import Mark, ttl_seconds
from radixkv.service.http.schema import ChatRequest

FIVE: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
POINT: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def text(words: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words} | (mark or {})


def chat(*contents: Any, **fields: Any) -> tuple[Mark, ...]:
    messages = [{"role": "user", "content": content} for content in contents]
    body = parse_body(json.dumps({"messages": messages} | fields).encode(), ChatRequest)
    return body.marks()


def claude(*contents: Any, **fields: Any) -> tuple[Mark, ...]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    raw = {"model": "m", "max_tokens": 1, "messages": messages} | fields
    return chat_of(parse_body(json.dumps(raw).encode(), MessagesRequest))[1]


def refused(ask: Any, *contents: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as e:
        ask(*contents, **fields)
    return e.value


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("7d", 604800), ("30d", 2592000)]
)
def test_a_time_to_live_is_a_number_and_a_unit(ttl: str, seconds: int) -> None:
    assert ttl_seconds(ttl) == seconds


@pytest.mark.parametrize("ttl", ["", "5", "m", "0m", "5 m", "1.5h", "31d", "-5m", "5m\n", "٥m"])
def test_any_other_time_is_refused(ttl: str) -> None:
    with pytest.raises(ValueError, match="at most 30d"):
        ttl_seconds(ttl)


@pytest.mark.parametrize("ask", [chat, claude])
def test_a_chat_without_breakpoints_has_none(ask: Any) -> None:
    assert ask("a", [text("b"), text("c")]) == ()


@pytest.mark.parametrize("ask", [chat, claude])
def test_a_breakpoint_is_behind_its_part_or_behind_the_whole_message(ask: Any) -> None:
    marks = ask([text("a", HOUR), text("b"), text("c", FIVE)], "d", [text("e", FIVE), text("f")])
    assert marks == (
        Mark(Cut(0, "a"), 3600.0),
        Mark(Cut(0), 300.0),
        Mark(Cut(2, "e"), 300.0),
    )


def test_the_system_prompt_is_the_first_message_and_turns_of_a_role_are_one() -> None:
    marks = claude(
        "a", system=[text("s", HOUR), text("t")], messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [text("b", FIVE), text("c")]},
        ],
    )  # fmt: skip
    assert marks == (Mark(Cut(0, "s"), 3600.0), Mark(Cut(1, "a\nb"), 300.0))


def test_a_message_may_carry_the_mark_of_its_last_part() -> None:
    messages = [{"role": "system", "content": "s"} | HOUR, {"role": "user", "content": "a"}]
    assert chat("", messages=messages) == (Mark(Cut(0), 3600.0),)


@pytest.mark.parametrize("ask", [chat, claude])
def test_a_mark_on_the_whole_is_one_behind_the_last_message(ask: Any) -> None:
    assert ask("a", "b", "c", **FIVE) == (Mark(Cut(2), 300.0),)
    assert ask("a", "b", [text("c", FIVE)], **FIVE) == (Mark(Cut(2), 300.0),)
    error = refused(ask, "a", "b", [text("c", HOUR)], **FIVE)
    assert error.param == "cache_control.ttl"


@pytest.mark.parametrize("ask", [chat, claude])
def test_at_most_four_and_the_long_ones_first(ask: Any) -> None:
    four = [text(str(i), FIVE) for i in range(4)]
    assert len(ask([*four, text("end")])) == 4
    assert "5 blocks" in str(refused(ask, [*four, text("end", FIVE)]))
    assert "5 blocks" in str(refused(ask, [*four, text("end")], **FIVE))
    error = refused(ask, [text("a", FIVE), text("b", HOUR)])
    assert error.param == "messages[0].content[1].cache_control.ttl"
    assert "longer ones come first" in str(error)
    assert "longer ones" in str(refused(ask, [text("a", FIVE), text("b")], **HOUR))


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": 5}, "cache_control"),
        ({"prompt_cache_breakpoint": {"mode": "implicit"}}, "prompt_cache_breakpoint.mode"),
        ({"prompt_cache_breakpoint": {}}, "prompt_cache_breakpoint.mode"),
    ],
)
def test_a_mark_that_is_none_is_refused_by_its_place(mark: dict[str, Any], param: str) -> None:
    assert refused(chat, [text("a", mark), text("b")]).param == f"messages[0].content[0].{param}"


@pytest.mark.parametrize("ask", [chat, claude])
def test_an_empty_part_cannot_be_marked(ask: Any) -> None:
    assert "is empty" in str(refused(ask, [text("a"), text("", FIVE)]))


def test_openais_breakpoints_live_half_an_hour_unless_said_otherwise() -> None:
    twelve = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    parts = [text("a", twelve), text("b", POINT), text("c")]
    assert chat(parts) == (Mark(Cut(0, "a"), 43200.0), Mark(Cut(0, "a\nb"), 1800.0))
    explicit = chat(parts, prompt_cache_options={"mode": "explicit", "ttl": "1h"})
    assert [mark.ttl_s for mark in explicit] == [43200.0, 3600.0]


def test_openais_options_add_one_at_the_end_and_the_latest_four_count() -> None:
    many = [text(str(i), POINT) for i in range(6)]
    ends = [mark.cut.text for mark in chat([*many, text("end")])]
    assert ends == ["0\n1\n2", "0\n1\n2\n3", "0\n1\n2\n3\n4", "0\n1\n2\n3\n4\n5"]
    marks = chat([*many, text("end")], prompt_cache_options={})
    assert [mark.cut.text for mark in marks] == [*ends[1:], None]
    assert chat("a", prompt_cache_options={"mode": "explicit"}) == ()
    assert chat("a", prompt_cache_options={"comparison_response_id": "chatcmpl-1"}) == ()


def test_retention_keeps_the_whole_for_a_day_and_goes_with_nothing_else() -> None:
    assert chat("a", "b", prompt_cache_retention="24h") == (Mark(Cut(1), 86400.0),)
    assert chat("a", prompt_cache_retention="in_memory") == ()
    for contents, fields in (
        (["a"], {"prompt_cache_options": {"mode": "explicit"}}),
        ([[text("a", POINT)]], {}),
    ):
        error = refused(chat, *contents, prompt_cache_retention="24h", **fields)
        assert error.param == "prompt_cache_retention"


def test_what_is_only_openais_means_nothing_to_anthropics_clients() -> None:
    assert claude([text("a", POINT)], prompt_cache_retention="24h") == ()
