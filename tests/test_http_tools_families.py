"""Forced calls in the other families' ways, from the grammar's tokens to the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.service.engine.engine import Engine
from radixkv.service.engine.loading import LoadedModel
from tests import tiny_models
from tests.http_server import RunningServer
from tests.tool_cases import ADD, WEATHER

SHOWN = "{{ (tools | tojson) if tools else '' }}"
LLAMA = SHOWN + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- call.arguments | tojson }}{{- '}' }}{# ipython #}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
MISTRAL = SHOWN + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    "{{- '[TOOL_CALLS][' }}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{% endif %}{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}' }}{{- ', ' if not loop.last else ']' }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NAMED = MISTRAL.replace("'[TOOL_CALLS][' }}", "'' }}{# [TOOL_CALLS] [ARGS] #}")


@pytest.fixture(scope="module", params=["llama", "mistral", "named"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, RunningServer]]:
    """A tiny model whose tokenizer has Mistral's markers as special tokens."""
    model, tokenizer = tiny_models.build("llama", vocab_size=320)
    markers = ["[TOOL_CALLS]", "[ARGS]"]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", *markers]}
    )
    tokenizer.chat_template = {"llama": LLAMA, "mistral": MISTRAL, "named": NAMED}[request.param]
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny")
    with Engine(loaded, kv_memory="8MiB", max_model_len=4096) as engine:
        server = RunningServer(engine, max_body=2**20, ping_s=15.0)
        try:
            yield request.param, server
        finally:
            server.close()


def test_a_forced_call_arrives_and_comes_back(server: tuple[str, RunningServer]) -> None:
    family, running = server
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    body = {
        "messages": asked,
        "tools": [ADD, WEATHER],
        "max_tokens": 150,
        "temperature": 1,
        "seed": 4,
    }
    forced = body | {"tool_choice": "required", "parallel_tool_calls": False}
    status, _, reply = running.ask(
        "POST", "/v1/chat/completions", forced | {"return_token_ids": True}
    )
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("add", "get_weather")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    text = running.engine.detokenize(choice["token_ids"])
    marks = {"llama": 0, "mistral": 1, "named": 2}[family]
    ids = running.engine.tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "[ARGS]"])
    assert sum(choice["token_ids"].count(i) for i in ids) == marks, text  # tokens, not letters
    result = {"role": "tool", "tool_call_id": call["id"], "content": "so"}
    history = [*asked, choice["message"], result]
    again = body | {"messages": history, "tool_choice": "none", "max_tokens": 1}
    status, _, reply = running.ask("POST", "/v1/chat/completions", again)
    assert status == 200, reply
    if family != "named":
        rendered = running.engine.render(history, tools=[ADD, WEATHER])
        assert text in running.engine.detokenize(rendered)


def test_a_streamed_call_shows_no_marker(server: tuple[str, RunningServer]) -> None:
    _, running = server
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [ADD],
        "tool_choice": "required",
        "max_tokens": 150,
        "parallel_tool_calls": False,
        "seed": 5,
    }
    events = running.events("/v1/chat/completions", body)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert not any(delta.get("content") for delta in deltas)
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "add"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert set(json.loads(arguments)) == {"a"}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
