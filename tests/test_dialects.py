"""The cache's routes take a prompt as either API has it, and mean by it what that API means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.service.http.dialects import HEADER, in_anthropics_words
from tests.http_server import RunningServer, running_server
from tests.tool_cases import ADD, WEATHER

TEMPLATE = str(Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja")
HI: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in (WEATHER, ADD)
]
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "one"}
CALLED = [
    *HI,
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "and then?"}]},
]
SPLIT = [*HI, {"role": "user", "content": "and you?"}]
BEGUN = [*HI, {"role": "assistant", "content": "the answer"}]
BODIES: dict[str, dict[str, Any]] = {
    "system": {"system": "be brief and say so", "messages": HI},
    "blocks": {"system": [{"type": "text", "text": "be brief"}], "messages": HI},
    "tools": {"tools": TOOLS, "messages": HI},
    "calls": {"messages": CALLED},
    "all": {"system": "be brief", "tools": TOOLS, "messages": CALLED},
    "two turns of one role": {"messages": SPLIT},
    "a begun answer": {"messages": BEGUN},
}
VERSION = {HEADER: "2023-06-01"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(chat_template=TEMPLATE, max_model_len=4096) as server:
        yield server


def headers_of(name: str) -> dict[str, str]:
    """The last two are told by the header alone: the same words are another chat of OpenAI's."""
    return {} if in_anthropics_words(BODIES[name]) else VERSION


def send(server: RunningServer, path: str, body: Any, headers: Any = None) -> Any:
    status, _, reply = server.ask("POST", path, body, headers=headers or {})
    assert status == 200, reply
    return reply


def sizes(usage: Any) -> tuple[int, int]:
    read = usage["cache_read_input_tokens"]
    return read, usage["input_tokens"] + usage["cache_creation_input_tokens"] + read


@pytest.mark.parametrize("name", BODIES)
def test_an_explanation_is_of_the_prompt_that_messages_would_run(
    server: RunningServer, name: str
) -> None:
    """DIAG-3 for Anthropic's clients: a system prompt beside the messages is not left out."""
    body = BODIES[name] | {"model": "tiny", "max_tokens": 1, "temperature": 0}
    salt = {"cache_salt": f"explain {name}"}
    for _ in range(2):
        told = send(server, "/v1/cache/explain", body | salt, headers_of(name))
        usage = send(server, "/v1/messages", body | salt)["usage"]
        assert (told["resident_tokens"], told["prompt_tokens"]) == sizes(usage)
    assert told["reasons"] == {"last_token": 1}


@pytest.mark.parametrize("name", BODIES)
def test_what_was_warmed_is_found_by_the_same_message(server: RunningServer, name: str) -> None:
    salt = {"cache_salt": f"prewarm {name}"}
    warmed = send(server, "/v1/cache/prewarm", BODIES[name] | salt, headers_of(name))
    message = BODIES[name] | salt | {"model": "tiny", "max_tokens": 1}
    read, prompt = sizes(send(server, "/v1/messages", message)["usage"])
    assert warmed["cached_tokens"] == 0
    assert (read, prompt) == (warmed["resident_tokens"], warmed["prompt_tokens"])
    assert read == prompt - 1


def test_breakpoints_count_when_warming_and_all_is_pinned_when_pinning(
    server: RunningServer,
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"system": [{"type": "text", "text": "be brief"} | mark], "messages": HI}
    warmed = send(server, "/v1/cache/prewarm", body)
    wanted = warmed["radixkv"]["wanted_tokens"]
    assert warmed["radixkv"]["pinned_tokens"] == wanted < warmed["prompt_tokens"]
    pinned = send(server, "/v1/cache/pin", body | {"ttl": "5m", "name": "brief"})
    assert pinned["pinned_tokens"] == pinned["wanted_tokens"] == warmed["prompt_tokens"]
    assert (pinned["ttl_s"], pinned["name"]) == (300.0, "brief")


@pytest.mark.parametrize("path", ["explain", "pin", "prewarm"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"system": 3, "messages": HI}, "system"),
        ({"system": "a", "messages": []}, "messages"),
        ({"system": "a", "messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"tools": [{"input_schema": []}], "messages": HI}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": []}, USE]}]}, "messages[0]"),
        ({"system": "a", "messages": HI, "thinking": {"type": "enabled"}}, "thinking"),
        ({"system": "a"}, ""),
    ],
)
def test_what_is_wrong_in_their_words_is_a_400_that_names_it(
    server: RunningServer, path: str, body: Any, param: str
) -> None:
    status, _, reply = server.ask("POST", f"/v1/cache/{path}", body)
    assert status == 400, reply
    assert str(reply["error"]["param"] or "").startswith(param), reply


def test_a_public_prompt_is_in_openais_words_and_says_so(server: RunningServer) -> None:
    """Left out unseen, the system prompt would make another prompt public than was meant."""
    body = {"system": "be brief", "messages": HI}
    status, _, reply = server.ask("POST", "/v1/cache/public", body)
    assert status == 400 and "system" in reply["error"]["message"]
    assert server.ask("GET", "/v1/cache/public")[2]["data"] == []
