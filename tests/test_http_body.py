"""Bodies that are refused say why, and name the field; bodies that are fine mean what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import SamplingParams
from radixkv.service.http.body import parse_body
from radixkv.service.http.schema import ChatRequest, CompletionRequest, TokenizeRequest

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> SamplingParams:
    body = parse_body(json.dumps({"messages": HI} | fields).encode(), ChatRequest)
    return body.sampling()


def completion(**fields: Any) -> SamplingParams:
    body = parse_body(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)
    return body.sampling()


def refused(raw: bytes | dict[str, Any], model: type[BaseModel] = ChatRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as e:
        body = parse_body(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), model)
        assert isinstance(body, ChatRequest | CompletionRequest)
        body.sampling()
    return e.value


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "line 1, column 2"),
        (b"[]", "must be a JSON object, not an array"),
        (b'"x"', "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8 (byte 0)"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"n": 1, "n": 2}', "'n' appears twice"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON that we accept"),
    ],
)
def test_what_is_no_proper_json_is_refused_with_the_reason(raw: bytes, words: str) -> None:
    assert words in str(refused(raw))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "null"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing required parameter"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "missing required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "part 0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
        ({"messages": ["x"]}, "messages[0]", ""),
        ({"max_tokens": "5"}, "max_tokens", '"5"'),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"temperature": True}, "temperature", "true"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 129}, "n", "128"),
        ({"seed": 2**70}, "seed", "less than"),
        ({"top_k": 2**63}, "top_k", "2147483647"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "0.01"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": {"a": 1}}, "stop", "list of strings"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"cache_salt": ""}, "cache_salt", "at least 1"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{1}}"}}, "chat_template_kwargs", "set here"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "set here"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "set here"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused({"messages": HI} | fields)
    assert error.param == param
    assert words in str(error)
    assert error.status == 400


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
        {"type": "video_url", "video_url": {}},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_a_content_part_that_is_not_text_is_refused_by_name(part: dict[str, Any]) -> None:
    """IDENTITY-4, IDENTITY-6: never dropped in silence, so never a hit on the text around it."""
    content = [{"type": "text", "text": "what is this?"}, part]
    error = refused({"messages": [*HI, {"role": "user", "content": content}]})
    assert error.param == "messages[1].content[1].type"
    assert part["type"] in str(error)
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{}]},
        {"structural_tag": "{}"},
        {"guided_whitespace_pattern": " "},
        {"store": True},
        {"reasoning_effort": "high"},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"chat_template": "{{ messages }}"},
        {"modalities": ["text", "audio"]},
        {"repeat_penalty": 1.1},
        {"lora_path": "x"},
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refused({"messages": HI} | fields)
    assert error.param == name
    assert name in str(error)


def test_neutral_values_and_harmless_fields_are_ignored() -> None:
    plain = chat()
    assert plain == chat(
        tools=[],
        tool_choice=None,
        functions=None,
        response_format={"type": "text"},
        store=False,
        user="me",
        metadata={"a": "b"},
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        service_tier="auto",
        parallel_tool_calls=True,
        modalities=["text"],
        logit_bias=None,
        stop=None,
        seed=None,
        never_heard_of={"x": [1]},
    )


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "scale", "priority", "batch", None])
def test_the_tiers_that_openai_knows_are_taken(tier: str | None) -> None:
    assert chat(service_tier=tier) == chat()


@pytest.mark.parametrize("tier", ["gold", "Batch", "batch ", "standard_only", 1])
def test_a_tier_that_is_none_is_refused_by_name(tier: object) -> None:
    error = refused({"messages": HI, "service_tier": tier})
    assert error.param == "service_tier" and "'batch'" in str(error)


def test_what_openai_sends_back_as_an_old_turn_is_accepted() -> None:
    old = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    chat(messages=[*HI, old, *HI])


def test_text_parts_become_one_text_and_a_developer_speaks_as_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    raw = json.dumps({"messages": [{"role": "developer", "content": parts}]}).encode()
    (message,) = parse_body(raw, ChatRequest).messages
    assert message.for_template() == {"role": "system", "content": "a\nb"}


def test_defaults_are_openais() -> None:
    assert chat() == SamplingParams(temperature=1.0, top_p=1.0, n=1, max_tokens=None)
    assert completion() == SamplingParams(max_tokens=16)


def test_fields_reach_the_engine() -> None:
    assert chat(
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        stop="x",
        stop_token_ids=[3],
        seed=-1,
        n=2,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"7": -100},
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
    ) == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        stop=("x",),
        stop_token_ids=(3,),
        seed=-1,
        n=2,
        logprobs=4,
        logit_bias={7: -100.0},
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, prompts: list[Any]) -> None:
    raw = json.dumps({"prompt": prompt}).encode()
    assert parse_body(raw, CompletionRequest).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 128}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused({"prompt": "x"} | fields, CompletionRequest).param == param


def test_best_of_equal_to_n_changes_nothing() -> None:
    assert completion(best_of=2, n=2, suffix=None) == completion(n=2)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completion(echo=True, logprobs=2).prompt_logprobs == 2
    assert completion(echo=True).prompt_logprobs is None
    assert completion(echo=True, max_tokens=0, logprobs=0).max_tokens == 1


def test_tokenize_wants_one_source() -> None:
    for body in ({}, {"prompt": "a", "content": "b"}):
        with pytest.raises(InvalidRequest, match="exactly one of"):
            parse_body(json.dumps(body).encode(), TokenizeRequest)


def test_messages_about_wrong_values_never_quote_long_text() -> None:
    error = refused({"messages": HI, "max_tokens": "secret " * 100})
    assert "secret" not in str(error)
