"""What the answer must look like, over HTTP: in each client's words, and refused in plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pydantic
import pytest

from tests.http_server import RunningServer, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=150)
    tags: list[bool] = pydantic.Field(max_length=2)


SCHEMA = Person.model_json_schema()
NAMED = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(kv_memory="16MiB") as running:
        yield running


def complete(server: RunningServer, **fields: Any) -> tuple[int, Any]:
    body = {"prompt": "hello", "max_tokens": 700, "temperature": 0.0} | fields
    status, _, answer = server.ask("POST", TEXT, body)
    return status, answer


def test_openais_client_parses_what_the_model_fills_in(server: RunningServer) -> None:
    parsed = server.client().chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=700, n=2, seed=4
    )
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Person)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": NAMED}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, SCHEMA),
        ({"structured_outputs": {"choice": ["1", "true"]}}, {"enum": [1, True]}),
        ({"guided_choice": ["1", "true"]}, {"enum": [1, True]}),
        ({"structured_outputs": {"regex": "[1-9]{3}"}}, {"type": "integer", "minimum": 111}),
        ({"guided_regex": "[1-9]{3}"}, {"type": "integer", "minimum": 111}),
        ({"regex": "[1-9]{3}"}, {"type": "integer", "minimum": 111}),
        ({"structured_outputs": {"grammar": 'start: "1" | "2"'}}, {"enum": [1, 2]}),
        ({"guided_grammar": 'root ::= "1" | "2"'}, {"enum": [1, 2]}),
        ({"ebnf": 'root ::= "1" | "2"'}, {"enum": [1, 2]}),
        ({"grammar": 'root ::= "1" | "2"'}, {"enum": [1, 2]}),
    ],
)
def test_each_way_to_say_it_is_followed_on_both_routes(
    server: RunningServer, fields: dict[str, Any], schema: Any
) -> None:
    status, answer = complete(server, **fields)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), schema)
    body = {"messages": MESSAGES, "max_tokens": 700, "temperature": 0.0} | fields
    events = server.events(CHAT, body)
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    jsonschema.validate(json.loads(text), schema)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_any_object_may_come_where_none_is_described(server: RunningServer) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        status, answer = complete(server, max_tokens=5, **fields)
        assert status == 200 and answer["choices"][0]["text"].startswith("{")
        assert answer["choices"][0]["finish_reason"] == "length"


def test_what_asks_for_nothing_changes_nothing(server: RunningServer) -> None:
    _, plain = complete(server, max_tokens=8)
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "structured_outputs": None},
        {"structured_outputs": {}, "guided_choice": [], "guided_regex": "", "grammar": ""},
    ):
        status, answer = complete(server, max_tokens=8, **fields)
        assert status == 200
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"regex": "a", "guided_choice": ["a"]}, "guided_choice", "wanted one of them"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex",
         "wanted one of them"),
        ({"response_format": {"type": "xml"}}, "response_format", "expected tags"),
        ({"response_format": {"type": "json_schema"}}, None, "missing required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format", "no schema"),
        ({"response_format": NAMED | {"json_schema": {"name": "a", "schema": {"type": "a"}}}},
         "response_format", "Invalid type: a"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": {"const": "a" * 9000}}, "guided_json", "a string of 9000 characters"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "no answer could ever end"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag",
         "not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern", "not supported"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "an empty one"),
    ],
)  # fmt: skip
def test_a_bad_one_is_a_400_that_says_why_and_nothing_is_queued(
    server: RunningServer, fields: dict[str, Any], param: str | None, why: str
) -> None:
    before = server.engine.stats().requests_total
    status, answer = complete(server, **fields)
    assert status == 400, answer
    assert why in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param
    status, _, answer = server.ask("POST", CHAT, {"messages": MESSAGES} | fields)
    assert status == 400 and why in answer["error"]["message"]
    assert server.engine.stats().requests_total == before


def test_a_grammar_that_fails_on_the_way_is_the_clients_fault(server: RunningServer) -> None:
    hostile = {"grammar": 'start: s\ns: s s | s s s | "a" |', "ignore_eos": True}
    status, answer = complete(server, max_tokens=400, **hostile)
    assert status == 400 and "cannot be followed any further" in answer["error"]["message"]
    assert complete(server, max_tokens=2)[0] == 200


def test_an_answer_with_logprobs_tells_the_tokens_that_were_said(server: RunningServer) -> None:
    status, answer = complete(server, guided_regex="[a-z ]{12}", logprobs=2)
    assert status == 200
    choice = answer["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
