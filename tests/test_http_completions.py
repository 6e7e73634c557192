"""POST /v1/completions, asked by OpenAI's own client and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.replies import CompletionReply
from tests.http_server import RunningServer, running_server

PATH = "/v1/completions"
GREEDY: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_a_completion_has_openais_shape_and_sixteen_tokens(server: RunningServer) -> None:
    body = {"prompt": "the user", "ignore_eos": True, "logprobs": 2, "echo": True}
    status, _, reply = server.ask("POST", PATH, body | {"return_token_ids": True})
    assert status == 200, reply
    assert TypeAdapter(CompletionReply).validate_python(reply, strict=True) == reply
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert reply["id"].startswith("cmpl-")


def test_choices_of_many_prompts_are_numbered_through(client: openai.OpenAI) -> None:
    prompts = ["the user", "and you", "hello"]
    alone = [
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=5).choices[0].text
        for prompt in prompts
    ]
    reply = client.completions.create(**GREEDY, prompt=prompts, max_tokens=5, n=2)
    assert [c.index for c in reply.choices] == list(range(6))
    assert [c.text for c in reply.choices] == [text for text in alone for _ in range(2)]
    assert reply.usage is not None and reply.usage.completion_tokens == 30


def test_text_and_its_token_ids_are_the_same_prompt(
    server: RunningServer, client: openai.OpenAI
) -> None:
    ids = server.ask("POST", "/tokenize", {"prompt": "the user is"})[2]["tokens"]
    by_text = client.completions.create(**GREEDY, prompt="the user is", max_tokens=6)
    by_ids = client.completions.create(**GREEDY, prompt=ids, max_tokens=6)
    in_batch = client.completions.create(**GREEDY, prompt=[ids, ids], max_tokens=6)
    texts = {c.text for r in (by_text, by_ids, in_batch) for c in r.choices}
    assert len(texts) == 1


def test_a_stream_of_many_prompts_joins_to_the_whole_answers(server: RunningServer) -> None:
    """STREAM-2, STREAM-3, USAGE-1"""
    body = {
        "prompt": ["the user", [5, 6, 7]],
        "n": 2,
        "seed": 3,
        "max_tokens": 9,
    }
    usage = {"stream_options": {"include_usage": True}}
    whole = server.ask("POST", PATH, body)[2]
    events = server.events(PATH, body | usage)
    assert events[-1] == "[DONE]"
    texts, reasons = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), "")
    for event in events[:-2]:
        assert TypeAdapter(CompletionReply).validate_python(event, strict=True) == event
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert reasons[choice["index"]] == "", "a chunk after the finish"
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or ""
    assert len({(e["id"], e["created"], e["model"]) for e in events[:-1]}) == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert texts == {c["index"]: c["text"] for c in whole["choices"]}
    assert reasons == {c["index"]: c["finish_reason"] for c in whole["choices"]}


def test_echo_and_logprobs_cover_the_prompt_cold_and_warm(server: RunningServer) -> None:
    """LOGPROBS-1: the same full list, whether or not the prefix is in the cache."""
    server.ask("POST", "/v1/cache/reset")
    prompt = "hello you and the user is in the system " * 3
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}
    cold = server.ask("POST", PATH, body)[2]["choices"][0]
    server.ask("POST", PATH, {"prompt": prompt, "max_tokens": 2})
    warm = server.ask("POST", PATH, body)[2]["choices"][0]
    assert cold["text"].startswith(prompt)
    lists = cold["logprobs"]
    num_prompt = len(server.ask("POST", "/tokenize", {"prompt": prompt})[2]["tokens"])
    assert len({len(values) for values in lists.values()}) == 1
    assert len(lists["tokens"]) >= num_prompt
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(value is not None for value in lists["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in lists["top_logprobs"][1:num_prompt])
    for token, offset in zip(lists["tokens"][:num_prompt], lists["text_offset"], strict=False):
        assert cold["text"].startswith(token, offset)
    assert warm["text"] == cold["text"]
    assert warm["logprobs"]["tokens"] == lists["tokens"]
    assert warm["logprobs"]["token_logprobs"][1:] == pytest.approx(
        lists["token_logprobs"][1:], abs=1e-4
    )
    assert server.ask("GET", "/health")[0] == 200


def test_a_prompt_can_be_scored_without_generating(server: RunningServer) -> None:
    body = {"prompt": "the user is", "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = server.ask("POST", PATH, body)[2]
    (choice,) = reply["choices"]
    assert choice["text"] == "the user is"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 0
    events = server.events(PATH, body | {"logprobs": None})
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["the user is", ""]


def test_echo_in_a_stream_comes_first_with_its_logprobs(server: RunningServer) -> None:
    body = {"prompt": "the user", "echo": True, "logprobs": 1, "max_tokens": 4, "seed": 1}
    whole = server.ask("POST", PATH, body)[2]["choices"][0]
    parts = [e["choices"][0] for e in server.events(PATH, body)[:-1]]
    assert parts[0]["text"] == "the user"
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "text_offset"):
        joined = [v for part in parts for v in (part["logprobs"] or {name: []})[name]]
        assert joined == whole["logprobs"][name]


def test_stop_strings_cross_tokens_and_never_leak(client: openai.OpenAI) -> None:
    """STREAM-1"""
    whole = client.completions.create(**GREEDY, prompt="the", max_tokens=24).choices[0].text
    stop = whole[5:8]
    parts = [
        chunk.choices[0]
        for chunk in client.completions.create(
            **GREEDY, prompt="the", max_tokens=24, stop=stop, stream=True
        )
    ]
    assert "".join(part.text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].finish_reason == "stop"


def test_a_refused_prompt_refuses_them_all(server: RunningServer) -> None:
    before = server.engine.stats().generation_tokens_total
    status, _, reply = server.ask("POST", PATH, {"prompt": ["fine", [999_999]]})
    assert status == 400
    assert reply["error"]["param"] == "prompt"
    server.wait_until(server.at_rest)
    assert server.engine.stats().generation_tokens_total - before < 16


def test_a_salt_of_ones_own_shares_with_nobody_else(server: RunningServer) -> None:
    """SECURITY-3: whatever the salt says, even the names of internal things."""
    prompt = "you and the user is in the system " * 4
    server.ask("POST", PATH, {"prompt": prompt, "max_tokens": 1})

    def cached(**fields: str) -> int:
        reply = server.ask("POST", PATH, {"prompt": prompt, "max_tokens": 1} | fields)[2]
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() > 0
    for salt in ("public", "None", "null", "local", "tiny", "warm-up", "\x00", "0" * 32):
        assert cached(cache_salt=salt) == 0
        assert cached(cache_salt=salt) > 0
    assert cached(prompt_cache_key="public", user="local") > 0
