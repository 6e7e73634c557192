"""What can never end is refused; what can end is not, whatever it looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.service.engine.grammar_ends import OneOf, Ref, can_end, schema_can_end
from radixkv.service.engine.grammar_lark import lark_can_end


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def obj(members: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": list(required)} | more


TREE = obj({"value": {"type": "string"}, "left": ref("t")}, "value", "left")


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$defs": {"t": TREE}} | ref("t"), False),
        ({"$defs": {"t": TREE | {"required": ["value"]}}} | ref("t"), True),
        ({"$defs": {"t": TREE | {"type": ["object", "null"]}}} | ref("t"), True),
        ({"$defs": {"t": {"anyOf": [TREE, {"type": "null"}]}}} | ref("t"), True),
        ({"$defs": {"t": {"anyOf": [TREE, TREE]}}} | ref("t"), False),
        ({"$defs": {"t": {"allOf": [TREE, {"type": "object"}]}}} | ref("t"), False),
        ({"$defs": {"a": obj({"b": ref("b")}, "b"), "b": obj({"a": ref("a")}, "a")}} | ref("a"),
         False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 2}, False),
        ({"$ref": "#"}, False),
        (obj({}, "a", additionalProperties={"$ref": "#"}), False),
        (obj({}, "a"), True),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, True),  # a number is valid too
        ({"const": {"$ref": "#"}}, True),
        ({"$ref": "#/$defs/none"}, True),  # for llguidance to say
        ({"$ref": "https://a.example"}, True),
        (True, True),
        ({"type": "object", "required": "a", "properties": 3}, True),
        ({"$defs": {"a/b~c": {"$ref": "#"}}, "$ref": "#/$defs/a~1b~0c"}, False),
    ],
)  # fmt: skip
def test_a_schema_ends_unless_each_of_its_values_holds_another(schema: Any, ends: bool) -> None:
    assert schema_can_end(json.dumps(schema)) is ends


@pytest.mark.parametrize(
    ("grammar", "ends"),
    [
        ('start: "a" start', False),
        ('start: ("a" | "b") start', False),
        ('start: "a" start | "b"', True),
        ('start: "a" start?', True),
        ('start: "a" start*', True),
        ('start: "a" start+', False),
        ('start: "a" [start]', True),
        ('start: "a" start~0..3', True),
        ('start: "a" start~2', False),
        ('start: "a" start{0,2}', True),
        ('start: "a" start{1,}', False),
        ('start: x\nx: "a" y // "b"\ny: "b" x', False),
        ('start: x\nx: "a" y\n  | "c"\ny: "b" x', True),
        ('start: (x\n | x "b")\nx: start', False),
        ('?start: WORD\nWORD: /[a-z]+/i', True),
        ('start[lazy]: x\nx: start', False),
        ('start: "|" /:|(/ <|im_start|> -> name', True),
        ('%ignore / +/\nstart: "a" start', False),
        ('start: %json {"type": "array", "minItems": 1, "items": {"$ref": "#"}}', False),
        ('start: "<" %json {"type": "object", "a": "}"} ">"\n', True),
        ('start: %json {"type": "object"} start', False),
        ("start: %regex {\"substring_words\": \"a b\"} start", False),
        ('start: none', True),
        ('start: %lark { start: "a" } start', True),  # not understood
        ('start: "a', True),
        ("start", True),
        ("start: (", True),
        ("", True),
    ],
)  # fmt: skip
def test_a_grammar_ends_unless_each_of_its_ways_goes_on(grammar: str, ends: bool) -> None:
    assert lark_can_end(grammar) is ends


def test_long_chains_take_no_time_that_matters() -> None:
    far = 20_000
    rules: dict[Any, Any] = {i: OneOf((Ref(i + 1),)) for i in range(far)}
    assert can_end(rules, 0)
    assert not can_end(rules | {far: Ref(0)}, 0)
