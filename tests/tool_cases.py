"""Calls as families of models write them, and answers to draw at random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from radixkv.service.tools_formats import FormatName

NAMES = ("add", "get_weather", "a.b-c")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=6), json_values, max_size=4)
layouts = st.sampled_from(
    [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": "\t"}]
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), json_objects), min_size=1, max_size=3)


def written(how: FormatName, made: Sequence[tuple[str, Any]], layout: Any) -> str:
    """Write calls as a model of the family does; JSON laid out in some way."""
    key = "parameters" if how == "llama3_json" else "arguments"
    shown = [json.dumps({"name": name, key: value}, **layout) for name, value in made]
    if how == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in shown)
    if how == "mistral":
        return f"[TOOL_CALLS][{', '.join(shown)}]"
    return "; ".join(shown)


def cut(text: str, at: Sequence[int]) -> list[str]:
    """Cut ``text`` into pieces at these places."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]
