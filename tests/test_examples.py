"""The examples run, on the small model, against one server, and say what was cached."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.service.engine.engine import Engine
from radixkv.service.engine.loading import LoadedModel
from tests.http_server import RunningServer, running_server
from tests.tenant_files import open_gate

EXAMPLES = Path(__file__).parents[1] / "examples"
COUNTS = re.compile(r"(\d+) prompt tokens cached, (\d+) computed")


@pytest.fixture(scope="module")
def server(smollm2: LoadedModel) -> Iterator[RunningServer]:
    """The small model, with a template that has a place for tools."""
    template = str(EXAMPLES / "templates" / "chatml_tools.jinja")
    with Engine(smollm2, chat_template=template, kv_memory="256MiB", max_model_len=2048) as engine:
        server = RunningServer(engine, max_body=2**20, ping_s=15.0)
        try:
            yield server
        finally:
            server.close()


def run(
    name: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run an example as a user does; returns what it printed."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def counts(said: str) -> list[tuple[int, int]]:
    """The (cached, computed) prompt tokens that were printed, in order."""
    return [(int(cached), int(computed)) for cached, computed in COUNTS.findall(said)]


def test_the_agent_calls_functions_and_computes_each_token_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LIBRARY-4: what a step computes is what the step before did not have."""
    said = run("agent_with_tools.py", ["--url", f"{server.url}/v1"], monkeypatch, capsys)
    *steps, whole = counts(said)
    assert len(steps) >= 3 and said.count(") = ") >= 2
    assert "error" not in said.partition("> ")[2].partition("step 3")[0]
    for (cached, computed), (next_cached, _) in zip(steps, steps[1:], strict=False):
        assert next_cached >= cached + computed - 1
    assert whole == tuple(map(sum, zip(*steps, strict=True)))


def test_langchain_calls_its_tool_twice_under_one_prompt(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("langchain_openai")
    said = run("agent_with_langchain.py", ["--url", f"{server.url}/v1"], monkeypatch, capsys)
    steps = counts(said)
    assert len(steps) == 4 and said.count("weather({'city': ") == 2
    for (cached, computed), (next_cached, _) in zip(steps, steps[1:], strict=False):
        assert next_cached >= cached + computed - 1


def test_pydantic_ai_gets_its_objects_under_one_prompt(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic_ai")
    said = run("agent_with_pydantic_ai.py", ["--url", f"{server.url}/v1"], monkeypatch, capsys)
    assert said.count("Ticket(kind=") == 3
    steps = counts(said)
    assert len(steps) == 3
    assert all(cached > 3 * computed for cached, computed in steps[1:])


def test_a_chat_of_openais_client_goes_on_from_what_is_cached(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run("chat_with_openai_client.py", [f"{server.url}/v1"], monkeypatch, capsys)
    turns = counts(said)
    assert len(turns) == 3
    assert all(cached > computed for cached, computed in turns[1:])


@pytest.mark.parametrize(
    ("name", "option"),
    [("chat_with_openai_client.py", []), ("chat_with_anthropic_client.py", ["--url"])],
)
def test_a_server_that_wants_another_key_is_quoted_in_one_line(
    name: str,
    option: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With or without /v1 in the URL; the key is the one of RADIXKV_API_KEY."""
    gate, _ = open_gate(tmp_path, alice={})
    with running_server(gate=gate) as server:
        for url in (server.url, f"{server.url}/v1"):
            monkeypatch.setenv("RADIXKV_API_KEY", "rk-wrong")
            with pytest.raises(SystemExit, match=f"^{server.url} says: .*Incorrect API key"):
                run(name, [*option, url], monkeypatch, capsys)


def test_the_judge_computes_its_rubric_once(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LIBRARY-4, with plain transformers: each answer costs its own tokens. 200 by default."""
    said = run("judge_with_transformers.py", ["--answers", "12"], monkeypatch, capsys)
    found = re.search(r"12 answers under a rubric of (\d+) tokens .* (\d+) computed", said)
    assert found is not None, said
    rubric, computed = int(found[1]), int(found[2])
    assert rubric < computed <= rubric + 12 * 10


def test_a_tree_of_thought_shares_what_its_branches_have_said(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run("tree_of_thought.py", ["--lines", "2", "--proposals", "2"], monkeypatch, capsys)
    found = re.search(r"(\d+) cached, (\d+) computed", said)
    assert found is not None and int(found[1]) > int(found[2]), said


def test_the_bare_cache_finds_all_but_what_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """56 of the 60 tokens are those of the prompt before, and it was published to its tail."""
    said = run("bare_cache.py", [], monkeypatch, capsys)
    found = re.findall(r"cached (\d+) of (\d+) tokens, blocks \[([\d, ]*)\]", said)
    assert [(int(cached), int(asked)) for cached, asked, _ in found] == [(0, 60), (56, 60)]
    first, second = (blocks.replace(",", " ").split() for *_, blocks in found)
    assert not first and len(second) == 4
    assert "hit_tokens=56" in said
