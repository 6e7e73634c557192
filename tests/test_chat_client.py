"""The terminal chat, piped, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixkv.service.chat import ChatError, ChatTerminal, Client, TurnStats, printable, server_url
from radixkv.service.cli import app
from tests.http_server import RunningServer, running_server
from tests.tenant_files import open_gate


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return CliRunner()


def ask(server: RunningServer, cli: CliRunner, lines: str, *options: str) -> tuple[str, str]:
    args = ["chat", "--url", server.url, "--max-tokens", "6", "--temperature", "0", *options]
    result = cli.invoke(app, args, input=lines)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_piped_turns_are_answered_and_later_ones_come_from_the_cache(
    server: RunningServer, cli: CliRunner
) -> None:
    stdout, stderr = ask(server, cli, "hello you\n\nand the user\n/exit\nnever asked\n")
    assert "cached" not in stdout
    first, second = re.findall(r"(\d+)/(\d+) prompt tokens cached", stderr)
    assert int(second[0]) >= int(first[1]) - 1, "the second turn begins with the first"
    assert stderr.count("first token") == 2


def test_reset_begins_anew_with_the_system_message(server: RunningServer, cli: CliRunner) -> None:
    _, stderr = ask(server, cli, "the\n/reset\nthe\n", "--system", "be the system")
    first, second = re.findall(r"(\d+)/(\d+) prompt tokens cached", stderr)
    assert first[1] == second[1], "the same prompt again"
    assert int(second[0]) == int(second[1]) - 1


def test_the_answer_is_what_the_server_says(server: RunningServer) -> None:
    client = Client(server.url + "/v1/", max_tokens=6, temperature=0)
    assert client.model == "tiny"
    messages = [{"role": "user", "content": "hello"}]
    stats = TurnStats()
    text = "".join(client.ask(messages, stats))
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    reply = server.ask("POST", "/v1/chat/completions", body)[2]
    assert text == reply["choices"][0]["message"]["content"]
    assert stats.prompt_tokens == reply["usage"]["prompt_tokens"]
    assert stats.completion_tokens == reply["usage"]["completion_tokens"]


def test_an_answer_that_is_left_early_is_aborted(server: RunningServer) -> None:
    client = Client(server.url, max_tokens=3000)
    answer = client.ask([{"role": "user", "content": "the"}], TurnStats())
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    server.wait_until(server.at_rest)


def test_what_the_server_refuses_is_shown_in_its_words(
    server: RunningServer, cli: CliRunner
) -> None:
    args = ["chat", "--url", server.url, "--max-tokens", "99999"]
    result = cli.invoke(app, args, input="hello\n")
    assert result.exit_code == 2
    assert "maximum context length" in result.stderr


def test_a_failed_turn_leaves_the_conversation_as_it_was(server: RunningServer) -> None:
    client = Client(server.url, max_tokens=99_999)
    terminal = ChatTerminal(client)
    with pytest.raises(ChatError):
        terminal.run(StringIO("hello\n"))
    assert terminal._messages == []


def test_a_server_that_is_no_openai_server_is_said_to_be_none(server: RunningServer) -> None:
    with pytest.raises(ChatError, match="no route GET /wrong/v1/models"):
        Client(server.url + "/wrong", max_tokens=1)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8137", "http://127.0.0.1:8137"),
        ("localhost:8137/v1/", "http://localhost:8137"),
        ("https://example.org/llm/v1", "https://example.org/llm"),
        (" http://127.0.0.1:8000/ ", "http://127.0.0.1:8000"),
    ],
)
def test_the_server_is_found_without_a_scheme_and_with_the_version(given: str, url: str) -> None:
    assert server_url(given) == url


def test_where_a_key_goes_is_said_when_none_was_given(tmp_path: Path) -> None:
    gate, keys = open_gate(tmp_path, alice={})
    with running_server(gate=gate) as server:
        with pytest.raises(ChatError, match="--api-key or in RADIXKV_API_KEY"):
            Client(server.url, max_tokens=1)
        assert Client(server.url, max_tokens=1, api_key=keys["alice"]).model == "tiny"


def test_a_server_named_without_a_scheme_answers(server: RunningServer, cli: CliRunner) -> None:
    stdout, _ = ask(server, cli, "hello\n", "--url", server.url.removeprefix("http://"))
    assert stdout.strip()


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\tc\n\x9b2J") == "a[31mb\tc\n2J"
