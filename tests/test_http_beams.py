"""Beam search and ``best_of`` over HTTP: vLLM's fields, answers with scores, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.replies import ChatReply, CompletionReply
from tests.batch_cases import completion, write_lines
from tests.http_server import RunningServer, running_server
from tests.test_batch_run import run as run_batch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK: Any = [{"role": "user", "content": "hello the world"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(block_size=4) as server:
        yield server


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    status, _, reply = server.ask("POST", COMPLETIONS, {"prompt": "the user", **fields})
    assert status == 200, reply
    assert TypeAdapter(CompletionReply).validate_python(reply, strict=True) == reply
    found: dict[str, Any] = reply
    return found


def test_a_search_answers_the_best_beams_with_their_scores(server: RunningServer) -> None:
    wanted = server.engine.beam_search("the user", beam_width=4, n=2, max_tokens=8)
    reply = complete(
        server, use_beam_search=True, best_of=4, n=2, max_tokens=8, return_token_ids=True
    )
    got = [(c["text"], c["token_ids"], c["score"]) for c in reply["choices"]]
    assert got == [(b.text, list(b.token_ids), b.score) for b in wanted.beams]
    assert [c["cumulative_logprob"] for c in reply["choices"]] == [
        b.cumulative_logprob for b in wanted.beams
    ]
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    assert reply["usage"]["completion_tokens"] == wanted.usage.completion_tokens
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    by_width = complete(server, use_beam_search=True, beam_width=4, n=2, max_tokens=8)
    by_n = complete(server, use_beam_search=True, n=4, max_tokens=8)
    texts = [c["text"] for c in reply["choices"]]
    assert [c["text"] for c in by_width["choices"]] == texts
    assert [c["text"] for c in by_n["choices"]][:2] == texts


def test_penalty_and_stopping_reach_the_search(server: RunningServer) -> None:
    asked: dict[str, Any] = {"length_penalty": -1.0, "early_stopping": "never", "max_tokens": 6}
    wanted = server.engine.beam_search("the user", beam_width=3, **asked)
    reply = complete(server, use_beam_search=True, n=3, **asked)
    assert [c["score"] for c in reply["choices"]] == [b.score for b in wanted.beams]


def test_a_chat_is_searched_and_streamed_in_one_piece_a_beam(server: RunningServer) -> None:
    body = {
        "messages": TALK,
        "max_tokens": 7,
        "n": 2,
        "best_of": 3,
        "use_beam_search": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, _, whole = server.ask("POST", CHAT, body)
    assert status == 200, whole
    assert TypeAdapter(ChatReply).validate_python(whole, strict=True) == whole
    assert whole["choices"][0]["score"] >= whole["choices"][1]["score"]
    with server.client() as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=TALK,
            max_tokens=7,
            n=2,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"use_beam_search": True, "best_of": 3, "ignore_eos": True},
        )
        chunks = list(stream)
    said: dict[int, list[str]] = {}
    ended: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.content:
                said.setdefault(choice.index, []).append(choice.delta.content)
            if choice.finish_reason:
                ended[choice.index] = choice.finish_reason
    assert {i: "".join(parts) for i, parts in said.items()} == {
        c["index"]: c["message"]["content"] for c in whole["choices"]
    }
    assert all(len(parts) == 1 for parts in said.values())
    assert ended == {0: "length", 1: "length"}
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 14


def test_several_prompts_are_searched_at_once(server: RunningServer) -> None:
    alone = [
        complete(server, prompt=prompt, use_beam_search=True, n=2, max_tokens=5)["choices"]
        for prompt in ("hello", "the and")
    ]
    both = complete(server, prompt=["hello", "the and"], use_beam_search=True, n=2, max_tokens=5)
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [c["text"] for part in alone for c in part]


def test_the_best_of_several_draws_are_answered(server: RunningServer) -> None:
    asked: dict[str, Any] = {"seed": 5, "max_tokens": 6, "ignore_eos": True}
    drawn = complete(server, n=5, logprobs=0, **asked)["choices"]
    best = complete(server, n=2, best_of=5, **asked)
    ranked = sorted(drawn, key=lambda c: -sum(c["logprobs"]["token_logprobs"]))
    assert [c["text"] for c in best["choices"]] == [c["text"] for c in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 30
    with server.client() as client:
        parts = list(
            client.completions.create(
                model="tiny",
                prompt="the user",
                n=2,
                seed=5,
                max_tokens=6,
                best_of=5,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
    assert [p.choices[0].text for p in parts] == [c["text"] for c in ranked[:2]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"n": 3, "beam_width": 2}, "n"),
        ({"beam_width": 2, "best_of": 3}, "beam_width"),
        ({"beam_width": 129}, "beam_width"),
        ({"length_penalty": 6}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
        ({"use_beam_search": None, "beam_width": 3}, "beam_width"),
        ({"use_beam_search": None, "n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 10**6}, "prompt"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_cannot_be_combined_is_a_400_that_names_it(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": TALK}
    status, _, reply = server.ask(
        "POST", path, prompt | {"use_beam_search": True, "max_tokens": 4} | fields
    )
    assert status == 400, reply
    wanted = "messages" if (param, path) == ("prompt", CHAT) else param
    assert (reply["error"]["param"] or "").startswith(wanted), json.dumps(reply)


def test_lines_of_a_batch_may_search(server: RunningServer, tmp_path: Path) -> None:
    """With batch work's share of the engine, and the same answers."""
    search = {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 6}
    lines = [completion("a", "the user", **search), completion("b", "hello", best_of=4, n=2)]
    _, answers = run_batch(server.engine, write_lines(tmp_path / "in.jsonl", lines))
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in answers}
    wanted = server.engine.beam_search("the user", beam_width=3, n=2, max_tokens=6, ignore_eos=True)
    assert [c["text"] for c in found["a"]] == [beam.text for beam in wanted.beams]
    assert [c["index"] for c in found["b"]] == [0, 1]


def test_neutral_values_change_nothing(server: RunningServer) -> None:
    plain = complete(server, temperature=0, max_tokens=5)
    asked = complete(
        server,
        temperature=0,
        max_tokens=5,
        use_beam_search=False,
        length_penalty=1,
        early_stopping=False,
        best_of=1,
    )
    assert [c["text"] for c in asked["choices"]] == [c["text"] for c in plain["choices"]]
    assert "score" not in plain["choices"][0]


def test_a_client_that_goes_away_takes_its_beams_along(server: RunningServer) -> None:
    """LEAK-1: nothing is held for it."""
    with server.client() as client, pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model="tiny",
            prompt="the user",
            max_tokens=3000,
            n=4,
            extra_body={"use_beam_search": True, "ignore_eos": True},
        )
    assert server.run(server.serving.wait_idle(15))
    assert server.engine.check() == [] == server.engine.check()  # and a step later: the counts
    assert server.engine.stats().num_running == server.engine.stats().used_blocks == 0
