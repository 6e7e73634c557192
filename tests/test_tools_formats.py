"""Which way a model writes calls is told by its template, or said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv.config import TOOL_CALL_PARSERS
from radixkv.service.engine.prompting import Prompting
from radixkv.service.tools_formats import FORMATS, Mistral, format_of
from radixkv.service.tools_history import shorten_ids, shown_call, with_objects
from tests.tiny_models import build_tokenizer

QWEN = "{%- for t in tools %}...{%- endfor %}<tool_call>\\n{{ tool_call.arguments | tojson }}"
LLAMA = "{{- '{\"name\": \"' + f.name + '\", ' }}{{- '\"parameters\": ' }} Environment: ipython"
CODER = "<tool_call>\n<function=' ~ name ~ '>\n<parameter=x>"
SHIPPED = Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja"


@pytest.mark.parametrize(
    "template, name",
    [
        (QWEN, "hermes"),
        (LLAMA, "llama3_json"),
        ('{{ "[TOOL_CALLS] [" }}', "mistral"),
        (CODER, None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_tells_by_its_markers(template: str | None, name: str | None) -> None:
    found = format_of(template)
    assert (found.name if found is not None else None) == name


def test_the_shipped_template_is_told() -> None:
    found = format_of(SHIPPED.read_text())
    assert found is not None and found.name == "hermes"


def test_what_was_asked_for_wins_and_all_that_can_be_asked_for_is_there() -> None:
    assert ("auto", *FORMATS) == TOOL_CALL_PARSERS
    for name in FORMATS:
        found = format_of(QWEN, name)
        assert found is not None and found.name == name


def test_mistrals_forms_are_told_apart() -> None:
    assert format_of('{{ "[TOOL_CALLS] [" }}') == Mistral(spaced=True)
    assert format_of('{{ "[TOOL_CALLS][" }}') == Mistral()
    assert format_of('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}') == Mistral(named=True)


# How the families' own templates write a call of the history.
OF_QWEN = (
    "{% for m in messages %}{% for tool_call in m.tool_calls or [] %}"
    '{%- set tool_call = tool_call.function %}{{- \'<tool_call>\n{"name": "\' }}'
    '{{- tool_call.name }}{{- \'", "arguments": \' }}{{- tool_call.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{% endfor %}{% endfor %}"
)
OF_LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set tool_call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- tool_call.arguments | tojson }}{{- '}' }}{# ipython #}{% endif %}{% endfor %}"
)
OF_MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}{{- '[TOOL_CALLS]' }}"
    "{% for tool_call in m.tool_calls %}{{- tool_call.function.name }}{{- '[ARGS]' }}"
    "{{- tool_call.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [OF_QWEN, OF_LLAMA, OF_MISTRAL, SHIPPED.read_text()])
def test_a_call_is_forced_as_the_template_writes_it_when_it_comes_back(template: str) -> None:
    """To the letter, so that the next turn finds all of the answer in the cache."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    how = Prompting(tokenizer, len(tokenizer)).tool_format
    assert how is not None
    before, after = how.around("add")
    arguments = '{"a": [1, 2.5, null], "b": {"é": "x\\"y"}}'
    call = shown_call("123456789", "add", arguments)
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    opening, closing = ("", "") if how.name == "mistral" else (how.opening, how.closing)
    shown = tokenizer.apply_chat_template(chat, tokenize=False)
    assert f"{opening}{before}{arguments}{after}{closing}" in shown
    assert how.single is (template is OF_LLAMA)


def test_arguments_are_shown_as_the_object_they_are_or_as_the_text() -> None:
    assert shown_call("c", "f", '{"b": 1, "a": 2}')["function"]["arguments"] == {"b": 1, "a": 2}
    assert shown_call("c", "f", "")["function"]["arguments"] == {}
    for broken in ('{"a": ', "[1]", "no", '{"a": ' + "[" * 100 + "]" * 100 + "}"):
        assert shown_call("c", "f", broken)["function"]["arguments"] == broken


def test_a_chat_as_clients_keep_it_is_shown_with_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call, {}]},
    ]
    user, assistant = with_objects(chat)
    assert user == chat[0]
    assert assistant["tool_calls"] == [shown_call("c", "f", '{"a": 1}'), {}]
    assert call["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]


def test_ids_are_shortened_always_in_the_same_way() -> None:
    call = shown_call("call_0123456789", "f", "{}")
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "call_0123456789"},
        {"role": "tool", "content": "x", "tool_call_id": "abcDEF123"},
    ]
    first, second, third = shorten_ids(chat)
    short = first["tool_calls"][0]["id"]
    assert len(short) == 9 and short.isalnum() and short == second["tool_call_id"]
    assert third["tool_call_id"] == "abcDEF123"
    assert call["id"] == "call_0123456789"
    assert shorten_ids([{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]
