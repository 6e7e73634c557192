"""Calls of functions over Anthropic's messages: the same prompts as OpenAI's, in other words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.anthropic_replies import MessageEvent, MessageReply
from tests.http_server import WAIT_S, RunningServer, running_server
from tests.scripted import saying
from tests.tool_cases import ADD, WEATHER

TEMPLATE = str(Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja")
HI: list[Any] = [{"role": "user", "content": "hello"}]
SAID = ["Let me see.\n<tool_call>\n", '{"name": "add", "arguments": {"a": ', "7}}\n</tool_call>"]


def theirs(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as Anthropic's clients write it."""
    function = dict(tool["function"])
    return {"input_schema": function.pop("parameters"), **function}


TOOLS = [theirs(WEATHER), theirs(ADD)]
RAW: dict[str, Any] = {
    "model": "tiny", "messages": HI, "tools": TOOLS, "temperature": 0, "max_tokens": 120,
}  # fmt: skip
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(chat_template=TEMPLATE, max_model_len=4096) as server:
        yield server


def ask(server: RunningServer, **fields: Any) -> Any:
    status, _, reply = server.ask("POST", "/v1/messages", RAW | fields)
    assert status == 200, reply
    assert TypeAdapter(MessageReply).validate_python(reply, strict=True) == reply
    return reply


def events(server: RunningServer, **fields: Any) -> list[Any]:
    status, _, text = server.ask("POST", "/v1/messages", RAW | fields | {"stream": True})
    assert status == 200, text
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            found.append(json.loads(block.partition("data: ")[2]))
            TypeAdapter(MessageEvent).validate_python(found[-1], strict=True)
    return found


def whole(usage: Any) -> int:
    return int(
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
    )


def test_a_required_call_is_a_tool_use_block(server: RunningServer) -> None:
    reply = ask(server, tool_choice=ONE_CALL)
    assert reply["stop_reason"] == "tool_use"
    (block,) = reply["content"]
    assert block["type"] == "tool_use" and block["id"].startswith("toolu_")
    assert block["name"] in ("add", "get_weather") and block["input"]
    named = ask(
        server, tool_choice={"type": "tool", "name": "add"} | {"disable_parallel_tool_use": True}
    )
    assert [block["name"] for block in named["content"]] == ["add"]


def test_anthropics_client_reads_a_streamed_call(server: RunningServer) -> None:
    with (
        anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S
        ) as client,
        client.messages.stream(
            model="tiny",
            max_tokens=120,
            messages=HI,
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice=ONE_CALL,  # type: ignore[arg-type]
        ) as stream,
    ):
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use" and isinstance(block.input, dict) and block.input
    assert message.stop_reason == "tool_use"


def test_blocks_begin_go_on_and_end_in_order(server: RunningServer) -> None:
    with saying(server, SAID):
        found = events(server)
        reply = ask(server)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks = found[2:-2]
    assert [(e["type"].removeprefix("content_block_"), e["index"]) for e in blocks] == [
        ("start", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("delta", 1),
        ("stop", 1),
    ]  # fmt: skip
    assert blocks[0]["content_block"] == {"type": "text", "text": ""}
    assert blocks[3]["content_block"]["name"] == "add"
    assert blocks[3]["content_block"]["input"] == {}
    pieces = [e["delta"]["partial_json"] for e in blocks[4:6]]
    assert pieces == ['{"a": ', "7}"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
    assert reply["content"][0]["text"] == "Let me see." and reply["content"][1]["input"] == {"a": 7}


@pytest.mark.parametrize("text", ["plain", '<tool_call>{"name": "add", "arguments": {"a": ', ""])
def test_what_is_no_whole_call_is_text_and_no_tool_use(server: RunningServer, text: str) -> None:
    with saying(server, [text], finish="length"):
        reply = ask(server)
        found = events(server)
    assert reply["content"] == [{"type": "text", "text": text}]
    assert reply["stop_reason"] == found[-2]["delta"]["stop_reason"] == "max_tokens"
    started = [e for e in found if e["type"] == "content_block_start"]
    stopped = [e for e in found if e["type"] == "content_block_stop"]
    assert len(started) == len(stopped)


def test_with_the_choice_none_answers_are_text(server: RunningServer) -> None:
    with saying(server, SAID):
        reply = ask(server, tool_choice={"type": "none"})
    assert reply["content"] == [{"type": "text", "text": "".join(SAID)}]
    assert reply["stop_reason"] == "end_turn"


def test_the_same_agent_is_the_same_prompt_by_either_api(server: RunningServer) -> None:
    """History with calls and results included: what one computed the other finds."""
    arguments = {"city": "Oslo", "days": 2}
    ours = [
        {"role": "system", "content": "be brief"},
        *HI,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain\nwind"},
        {"role": "user", "content": "and?"},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": arguments}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}],
    }
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    body = {"messages": ours, "tools": [WEATHER, ADD], "max_tokens": 2}
    first = server.ask("POST", "/v1/chat/completions", body)[2]["usage"]
    again = ask(server, system="be brief", messages=messages, max_tokens=2)["usage"]
    assert whole(again) == first["prompt_tokens"]
    assert again["input_tokens"] == 1
    counted = {"model": "tiny", "system": "be brief", "messages": messages, "tools": TOOLS}
    status, _, count = server.ask("POST", "/v1/messages/count_tokens", counted)
    assert (status, count["input_tokens"]) == (200, first["prompt_tokens"])


def test_breakpoints_on_tools_calls_and_results_keep_what_comes_before(
    server: RunningServer,
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "one"}
    tools = [TOOLS[0], TOOLS[1] | mark]
    plain = ask(server, max_tokens=1, tools=TOOLS)["radixkv"]
    assert "wanted_tokens" not in plain
    wanted = []
    for calls, results in (({}, {}), (mark, {}), ({}, mark)):
        messages = [
            *HI,
            {"role": "assistant", "content": [use | calls, use | {"id": "c2"}]},
            {"role": "user", "content": [result | results, result | {"tool_use_id": "c2"}]},
        ]
        reply = ask(server, max_tokens=1, tools=tools, messages=messages)
        wanted.append(reply["radixkv"]["wanted_tokens"])
    assert wanted == sorted(set(wanted))  # each lies behind the one before
    assert wanted[-1] < whole(reply["usage"])
    late = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "be brief"} | late]
    status, _, reply = server.ask("POST", "/v1/messages", RAW | {"tools": tools, "system": system})
    assert status == 400 and "ttl" in reply["error"]["message"]


def test_tools_that_changed_are_told(server: RunningServer) -> None:
    """DIAG-2."""
    first = ask(server, max_tokens=1, diagnostics={"previous_message_id": None})
    changed = [TOOLS[0], TOOLS[1] | {"description": "Adds."}]
    asked = {"previous_message_id": first["id"]}
    told = ask(server, max_tokens=1, tools=changed, diagnostics=asked, radixkv={"explain": True})
    assert told["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
    record = told["radixkv"]["explain"]
    assert record["divergence"]["region"]["kind"] == "tools"
    assert record["resident_tokens"] == told["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
         "messages[0].content[0]"),
        ({"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "c"}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0]"),
        ({"messages": [*HI, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]}, "tool_result"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_words(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    status, _, reply = server.ask("POST", "/v1/messages", RAW | fields)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert words in reply["error"]["message"]
