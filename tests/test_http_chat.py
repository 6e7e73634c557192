"""POST /v1/chat/completions, asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.replies import ChatChunk, ChatReply
from tests.http_server import RunningServer, running_server

HI: Any = [{"role": "user", "content": "hello you and the user is in the system"}]
GREEDY: Any = {
    "model": "tiny",
    "messages": HI,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_an_answer_has_openais_shape_and_nothing_unexplained(server: RunningServer) -> None:
    body = {"messages": HI, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}
    for extra in ({}, {"return_token_ids": True, "prompt_logprobs": 1}):
        status, _, reply = server.ask("POST", "/v1/chat/completions", body | extra)
        assert status == 200, reply
        assert TypeAdapter(ChatReply).validate_python(reply, strict=True) == reply
    assert len(reply["prompt_logprobs"]) == len(reply["prompt_token_ids"])
    assert reply["prompt_logprobs"][0] is None
    for token_id, entry in zip(
        reply["prompt_token_ids"][1:], reply["prompt_logprobs"][1:], strict=True
    ):
        assert str(token_id) in entry


def test_the_model_may_be_left_out_but_not_be_another(client: openai.OpenAI) -> None:
    for name in ("tiny", "default", ""):
        answer = client.chat.completions.create(**GREEDY | {"model": name}, max_tokens=1)
        assert answer.model == "tiny"
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(**GREEDY | {"model": "gpt-4"}, max_tokens=1)
    assert (e.value.code, e.value.param) == ("model_not_found", "model")


def test_usage_tells_cached_tokens_cold_and_warm(
    server: RunningServer, client: openai.OpenAI
) -> None:
    """USAGE-2, USAGE-5: without any flag, and 0 rather than absent on a miss."""
    server.ask("POST", "/v1/cache/reset")
    prompt_tokens = []
    for expected_hit in (False, True):
        usage = client.chat.completions.create(**GREEDY, max_tokens=3).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached == (usage.prompt_tokens - 1 if expected_hit else 0)
        assert usage.completion_tokens == 3
        assert usage.total_tokens == usage.prompt_tokens + 3
        prompt_tokens.append(usage.prompt_tokens)
    assert prompt_tokens[0] == prompt_tokens[1]


def test_greedy_answers_are_equal_warm_cold_and_for_every_choice(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**GREEDY, max_tokens=8).choices[0]
    again = client.chat.completions.create(**GREEDY, max_tokens=8, n=3)
    assert [c.index for c in again.choices] == [0, 1, 2]
    assert {c.message.content for c in again.choices} == {first.message.content}
    assert {c.finish_reason for c in again.choices} == {"length"}


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def answers(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model="tiny", messages=HI, n=3, seed=seed, max_tokens=8
        )
        return [choice.message.content for choice in reply.choices]

    assert answers(7) == answers(7)
    assert len({*answers(7), *answers(8)}) > 3


def test_logprobs_cover_the_text_token_by_token(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        **GREEDY, max_tokens=8, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(t.bytes or []) for t in choice.logprobs.content)
    assert raw.decode("utf-8", "replace") == choice.message.content
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # greedy takes the likeliest
    bare = client.chat.completions.create(**GREEDY, max_tokens=2, logprobs=True).choices[0]
    assert bare.logprobs is not None and bare.logprobs.content is not None
    assert [t.top_logprobs for t in bare.logprobs.content] == [[], []]


def test_a_bias_decides(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=3, logit_bias={"36": 100})
    assert len(set(answer.choices[0].message.content or "")) == 1


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    """STREAM-1, without a stream."""
    whole = client.chat.completions.create(**GREEDY, max_tokens=24).choices[0].message.content
    assert whole is not None
    stop = whole[4:6]
    choice = client.chat.completions.create(**GREEDY, max_tokens=24, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop


def test_a_stream_has_the_same_text_as_a_whole_answer(client: openai.OpenAI) -> None:
    """STREAM-3: for many prompts, whose answers are full of broken and multi-byte characters."""
    for i in range(8):
        asked: Any = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"the {i} 👋 日本"}],
            "max_tokens": 16,
            "seed": i,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        parts = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in parts)
        assert text == whole.message.content
        assert parts[-1].choices[0].finish_reason == whole.finish_reason


def test_chunks_keep_id_model_and_time_and_each_index_begins_and_ends_once(
    server: RunningServer,
) -> None:
    """STREAM-2, STREAM-4"""
    events = server.events(
        "/v1/chat/completions", {"messages": HI, "max_tokens": 6, "n": 3, "ignore_eos": True}
    )
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    for chunk in chunks:
        assert TypeAdapter(ChatChunk).validate_python(chunk, strict=True) == chunk
        assert "usage" not in chunk
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["model"] == "tiny" and chunks[0]["id"].startswith("chatcmpl-")
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert ["role" in part["delta"] for part in mine].count(True) == 1
        reasons = [part["finish_reason"] for part in mine]
        assert reasons[-1] == "length"
        assert reasons[:-1] == [None] * (len(mine) - 1)


def test_options_of_a_stream_without_a_stream_are_a_400(server: RunningServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        asked = body | {"stream_options": {"include_usage": True}, "stream": False}
        status, _, reply = server.ask("POST", path, asked)
        assert (status, reply["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_include_usage_no_chunk_has_usage(
    server: RunningServer, options: dict[str, bool] | None
) -> None:
    """USAGE-4"""
    body = {"messages": HI, "max_tokens": 2, "stream_options": options}
    assert all("usage" not in e for e in server.events("/v1/chat/completions", body)[:-1])


def test_usage_comes_once_last_and_is_null_before(client: openai.OpenAI) -> None:
    """USAGE-1, USAGE-4"""
    for _ in range(2):
        chunks = list(
            client.chat.completions.create(
                **GREEDY, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
        )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "usage" in chunks[0].model_fields_set
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) > 0
    assert last.usage.completion_tokens == 4


def test_a_stop_string_is_never_shown_not_even_its_beginning(client: openai.OpenAI) -> None:
    """STREAM-1, LOGPROBS-2: tokens listed in a chunk are those of its text."""
    whole = client.chat.completions.create(**GREEDY, max_tokens=24).choices[0].message.content
    assert whole is not None
    stop = whole[6:9]
    text = ""
    for chunk in client.chat.completions.create(
        **GREEDY, max_tokens=24, stop=[stop], stream=True, logprobs=True
    ):
        (choice,) = chunk.choices
        shown = choice.delta.content or ""
        listed = choice.logprobs.content if choice.logprobs else None
        raw = b"".join(bytes(t.bytes or []) for t in listed or [])
        assert raw.decode("utf-8", "replace") == shown
        text += shown
    assert text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_a_chat_its_rendered_text_and_its_ids_are_one_prompt(server: RunningServer) -> None:
    """TEMPLATE-4: the same ids by every way, so each finds what the others cached."""
    server.ask("POST", "/v1/cache/reset")
    ids = server.ask("POST", "/tokenize", {"messages": HI})[2]["tokens"]
    text = server.ask("POST", "/detokenize", {"tokens": ids})[2]["prompt"]
    assert server.ask("POST", "/tokenize", {"prompt": text})[2]["tokens"] == ids
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ids}),
    ]
    for path, body in asked:
        usage = server.ask("POST", path, body | {"max_tokens": 1})[2]["usage"]
        warm = (path, body) != asked[0]
        assert usage["prompt_tokens"] == len(ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1 if warm else 0)


def test_the_last_message_can_be_continued(server: RunningServer) -> None:
    open_end = [*HI, {"role": "assistant", "content": "the answer"}]
    body = {"messages": open_end, "continue_final_message": True}
    ids = server.ask("POST", "/tokenize", body)[2]["tokens"]
    text = server.ask("POST", "/detokenize", {"tokens": ids})[2]["prompt"]
    assert text.endswith("the answer")
    status, _, reply = server.ask(
        "POST", "/v1/chat/completions", body | {"add_generation_prompt": True}
    )
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")
