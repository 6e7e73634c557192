"""What is said of a wrong body names the place in it, also inside what may have several forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.http.anthropic_schema import MessagesRequest
from radixkv.service.http.body import parse_body
from radixkv.service.http.cache_explain import ExplainRequest

HI = [{"role": "user", "content": "hello"}]
LONG = {"cache_control": {"type": "ephemeral", "ttl": "2h"}}


def blocks(*content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"system": [{"type": "text", "text": "a", **LONG}]},
            "system[0].cache_control.ttl",
            "system[0].cache_control.ttl is \"2h\"; wanted '5m' or '1h'",
        ),
        (
            # The branch of the union is named "text", and so is a field of it.
            blocks({"type": "text", "text": "a", **LONG}),
            "messages[0].content[0].cache_control.ttl",
            "messages[0].content[0].cache_control.ttl is \"2h\"; wanted '5m' or '1h'",
        ),
        (
            blocks({"type": "text", "text": "a", "cache_control": "ephemeral"}),
            "messages[0].content[0].cache_control",
            'messages[0].content[0].cache_control is "ephemeral"; wanted an object',
        ),
        (
            blocks({"type": "text"}),
            "messages[0].content[0].text",
            "missing required parameter: 'messages[0].content[0].text'",
        ),
        (
            blocks({"type": "text", "text": 3}),
            "messages[0].content[0].text",
            "messages[0].content[0].text is 3; wanted a valid string",
        ),
        (
            blocks({"text": "a"}),
            "messages[0].content[0].type",
            "missing required parameter: 'messages[0].content[0].type'",
        ),
        (
            blocks(
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": []}],
                }
            ),
            "messages[0].content[0].content[0].text",
            "messages[0].content[0].content[0].text is an array; wanted a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            "messages[0].content is 3; wanted a valid string or a valid list",
        ),
        (
            blocks(),
            "messages[0].content",
            "messages[0].content: List should have at least 1 item after validation, not 0",
        ),
        (
            {"system": {}},
            "system",
            "system is an object; wanted a valid string or a valid list",
        ),
    ],
)
def test_the_branch_that_came_furthest_is_told_and_no_branch_is_named(
    fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 1} | fields
    with pytest.raises(InvalidRequest) as e:
        parse_body(json.dumps(body).encode(), MessagesRequest)
    assert (e.value.param, str(e.value)) == (param, message)


def test_two_types_that_a_value_may_have_are_both_told() -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_body(json.dumps({"messages": HI, "logprobs": "x"}).encode(), ExplainRequest)
    assert str(e.value) == 'logprobs is "x"; wanted a valid integer or a valid boolean'
    assert (e.value.param, e.value.code) == ("logprobs", "invalid_type")
