"""POST /v1/messages and its count_tokens, asked by Anthropic's own client."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.anthropic_replies import MessageEvent, MessageReply
from tests.http_server import WAIT_S, RunningServer, running_server

HI: Any = [{"role": "user", "content": "hello you and the user is in the system"}]
# Their newest client has no argument for the temperature any more; older ones and others do.
GREEDY: Any = {"model": "tiny", "messages": HI, "extra_body": {"temperature": 0}}
RAW: dict[str, Any] = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


def named_events(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Stream an answer; each event's name must be its type."""
    status, headers, text = server.ask("POST", "/v1/messages", body | {"stream": True})
    assert status == 200, text
    assert headers["Content-Type"].startswith("text/event-stream")
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def text_of(message: Any) -> str:
    """The text of an answer that is one block of text."""
    return str(message.content[0].text)


def whole(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_an_answer_has_anthropics_shape_and_nothing_unexplained(server: RunningServer) -> None:
    status, headers, reply = server.ask("POST", "/v1/messages", RAW)
    assert status == 200, reply
    assert TypeAdapter(MessageReply).validate_python(reply, strict=True) == reply
    ids = {value for name, value in headers.items() if "request-id" in name.lower()}
    assert len(ids) == 1 and headers["request-id"] in ids


def test_the_same_words_are_the_same_answer_on_both_apis(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    """Also with a system prompt in parts: the tokens are equal, so the second is cached."""
    server.ask("POST", "/v1/cache/reset")
    said = client.messages.create(
        **GREEDY,
        max_tokens=8,
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "the system"}],
    )
    chat = [{"role": "system", "content": "be\nthe system"}, *HI]
    body = {"messages": chat, "temperature": 0, "max_tokens": 8}
    reply = server.ask("POST", "/v1/chat/completions", body)[2]
    (block,) = said.content
    assert block.type == "text" and block.text == reply["choices"][0]["message"]["content"]
    assert said.id.startswith("msg_") and said.model == "tiny" and said.role == "assistant"
    assert reply["usage"]["prompt_tokens"] == whole(said.usage)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == whole(said.usage) - 1


def test_usage_parts_the_prompt_into_what_was_read_and_the_rest(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    server.ask("POST", "/v1/cache/reset")
    cold = client.messages.create(**GREEDY, max_tokens=3).usage
    warm = client.messages.create(**GREEDY, max_tokens=3).usage
    assert (cold.cache_read_input_tokens, cold.cache_creation_input_tokens) == (0, 0)
    assert warm.cache_read_input_tokens == whole(warm) - 1 and warm.input_tokens == 1
    assert whole(cold) == whole(warm)
    assert cold.output_tokens == warm.output_tokens == 3
    count = client.messages.count_tokens(model="tiny", messages=HI)
    assert count.input_tokens == whole(cold)


def test_the_reason_of_the_end_is_told_in_their_words(client: anthropic.Anthropic) -> None:
    long = client.messages.create(**GREEDY, max_tokens=24)
    assert (long.stop_reason, long.stop_sequence) == ("max_tokens", None)
    text = text_of(long)
    stop = text[4:6]
    cut = client.messages.create(**GREEDY, max_tokens=24, stop_sequences=["never said", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == text[: text.index(stop)]
    for seed in range(200):  # the end token is one of some 300, drawn sooner or later
        ended = client.messages.create(
            model="tiny", messages=HI, max_tokens=64, extra_body={"seed": seed}
        )
        if ended.stop_reason == "end_turn":
            assert ended.stop_sequence is None and ended.usage.output_tokens <= 64
            return
    raise AssertionError("no answer ended by itself")


def test_a_stream_is_the_same_answer_in_their_order_of_events(server: RunningServer) -> None:
    """STREAM-3, STREAM-4"""
    reply = server.ask("POST", "/v1/messages", RAW)[2]
    events = named_events(server, RAW)
    for event in events:
        assert TypeAdapter(MessageEvent).validate_python(event, strict=True) == event
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(e["delta"]["text"] for e in events[3:-3]) == reply["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["model"]) == ([], None, "tiny")


def test_usage_is_the_same_at_the_start_and_at_the_end_of_a_stream(server: RunningServer) -> None:
    """USAGE-1"""
    named_events(server, RAW)
    events = named_events(server, RAW)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert end["output_tokens"] == 6
    assert start | {"output_tokens": 6} == end
    assert end["cache_read_input_tokens"] > 0


def test_their_client_puts_a_stream_together(client: anthropic.Anthropic) -> None:
    said = client.messages.create(**GREEDY, max_tokens=12)
    with client.messages.stream(**GREEDY, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(final) == text == text_of(said)
    assert final.stop_reason == said.stop_reason
    assert final.usage.output_tokens == 12
    assert whole(final.usage) == whole(said.usage)


def test_a_stop_sequence_is_never_shown_in_a_stream(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    """STREAM-1"""
    text = text_of(client.messages.create(**GREEDY, max_tokens=24))
    stop = text[6:9]
    events = named_events(server, RAW | {"max_tokens": 24, "stop_sequences": [stop]})
    shown = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert shown == text[: text.index(stop)]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_turns_of_one_role_are_one_and_the_last_may_be_continued(server: RunningServer) -> None:
    split: list[dict[str, object]] = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "the answer"},
    ]
    count = server.ask("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": split})
    chat = [
        {"role": "user", "content": "hello\nyou"},
        {"role": "assistant", "content": "the answer"},
    ]
    body = {"messages": chat, "continue_final_message": True, "add_generation_prompt": False}
    assert count[2] == {"input_tokens": server.ask("POST", "/tokenize", body)[2]["count"]}
    assert server.ask("POST", "/v1/messages", RAW | {"messages": split})[0] == 200
    split[-1]["content"] = "the answer "
    status, _, reply = server.ask("POST", "/v1/messages", RAW | {"messages": split})
    assert status == 400 and "white space" in reply["error"]["message"]


def test_errors_have_anthropics_shape_and_their_client_knows_them(
    server: RunningServer, client: anthropic.Anthropic
) -> None:
    """ERRORS-1, in this API's words"""
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**GREEDY | {"model": "gpt-4"}, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**GREEDY, max_tokens=100_000)
    for path, body, status, kind, words in (
        ("/v1/messages", {"model": "tiny", "messages": HI}, 400, "invalid_request_error",
         "max_tokens"),
        ("/v1/messages", RAW | {"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ("/v1/messages", RAW | {"messages": []}, 400, "invalid_request_error", "messages"),
        ("/v1/messages/other", RAW, 404, "not_found_error", "no route POST"),
    ):  # fmt: skip
        got, headers, reply = server.ask("POST", path, body)
        assert (got, reply["type"], reply["error"]["type"]) == (status, "error", kind), reply
        assert words in reply["error"]["message"]
        assert reply["request_id"] == headers["request-id"]
    assert server.ask("GET", "/v1/messages")[2]["type"] == "error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking"}]}]},
            "'thinking'",
        ),
        ({"system": [{"type": "document", "source": {}}]}, "system[0]"),
    ],
)
def test_what_is_not_done_is_refused_and_not_ignored(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    """IDENTITY-4: an image is a clear 400."""
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, _, reply = server.ask("POST", path, RAW | fields)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert words in reply["error"]["message"]


def test_neutral_values_and_vendor_headers_are_taken(server: RunningServer) -> None:
    fields: dict[str, Any] = {
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "none"},
        "tools": [],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "top_k": 5,
        "top_p": 0.9,
        "system": "",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "extended-cache-ttl-2025-04-11"}
    status, _, reply = server.ask("POST", "/v1/messages", RAW | fields, headers=headers)
    assert status == 200, reply


@pytest.mark.parametrize(("tier", "wanted"), [("standard_only", 200), ("gold", 400)])
def test_a_tier_is_one_that_the_api_knows(server: RunningServer, tier: str, wanted: int) -> None:
    status, _, reply = server.ask("POST", "/v1/messages", RAW | {"service_tier": tier})
    assert status == wanted, reply
    assert wanted == 200 or "service_tier" in reply["error"]["message"]


def test_where_a_prompt_leaves_an_earlier_one_is_told_if_asked(server: RunningServer) -> None:
    """DIAG-2, in this API's words; also in the first event of a stream."""
    first = server.ask("POST", "/v1/messages", RAW | {"system": "be brief"})[2]
    assert "diagnostics" not in first
    asked = RAW | {"diagnostics": {"previous_message_id": first["id"]}}
    reply = server.ask("POST", "/v1/messages", asked | {"system": "be long"})[2]
    assert TypeAdapter(MessageReply).validate_python(reply, strict=True) == reply
    assert reply["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    (start, *_) = named_events(server, asked | {"system": "be brief"})
    assert start["message"]["diagnostics"] == {"cache_miss_reason": None}
    unknown = {"previous_message_id": "msg_of_nobody"}
    reply = server.ask("POST", "/v1/messages", RAW | {"diagnostics": unknown})[2]
    reason = reply["diagnostics"]["cache_miss_reason"]["type"]
    assert reason == "previous_message_not_found"


def test_an_answer_carries_the_account_of_its_prompt_if_asked(server: RunningServer) -> None:
    reply = server.ask("POST", "/v1/messages", RAW | {"radixkv": {"explain": True}})[2]
    record = reply["radixkv"]["explain"]
    assert record["resident_tokens"] == reply["usage"]["cache_read_input_tokens"]
    assert TypeAdapter(MessageReply).validate_python(reply, strict=True) == reply


def test_the_example_keeps_its_system_prompt(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[1] / "examples" / "chat_with_anthropic_client.py"
    monkeypatch.setattr("sys.argv", [str(file), "--url", server.url])
    runpy.run_path(str(file), run_name="__main__")
    made, read = re.findall(r"read (\d+) tokens .*, put in (\d+) to stay", capsys.readouterr().out)
    assert int(made[0]) < 20 and int(made[1]) > 1000
    assert int(read[0]) >= int(made[1]) and int(read[1]) == 0
