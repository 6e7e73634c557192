"""POST /v1/cache/explain and the record in answers: right numbers, right places, nobody else's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import bearer, open_gate

FILLER = "the user is in the system and the assistant is to answer. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(max_model_len=2048) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(server: RunningServer) -> None:
    server.wait_until(lambda: server.engine.stats().num_running == 0)
    assert server.ask("POST", "/v1/cache/reset")[0] == 200


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(server: RunningServer, messages: list[dict[str, str]], **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 3, "temperature": 0} | fields
    status, _, reply = server.ask("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    return reply


def explain(server: RunningServer, **body: Any) -> Any:
    status, _, reply = server.ask("POST", "/v1/cache/explain", body)
    assert status == 200, reply
    assert reply["prompt_tokens"] == reply["resident_tokens"] + reply["missing_tokens"]
    assert sum(reply["reasons"].values()) == reply["missing_tokens"]
    return reply


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


SYSTEM = turn("system", FILLER)


def test_it_says_what_the_same_chat_gets_next(server: RunningServer) -> None:
    """DIAG-3: a dry run equals cached_tokens of a real request sent next, and changes nothing."""
    draw = random.Random(5)
    words = ["the", "user", "system", "hello", "and", "is", "of", "to"]
    chats: list[list[dict[str, str]]] = [[SYSTEM, turn("user", "hello")]]
    for _ in range(12):
        messages = list(draw.choice(chats))
        if draw.random() < 0.3 and len(messages) > 2:
            messages = messages[:-1]
        role = "user" if messages[-1]["role"] != "user" else "assistant"
        messages.append(turn(role, " ".join(draw.choices(words, k=draw.randrange(1, 40)))))
        chats.append(messages)
        told = explain(server, messages=messages, max_tokens=3, temperature=0)
        assert told == explain(server, messages=messages)
        reply = chat(server, messages)
        assert told["prompt_tokens"] == reply["usage"]["prompt_tokens"]
        assert told["resident_tokens"] == cached(reply)
        if draw.random() < 0.15:
            server.ask("POST", "/v1/cache/reset")


def test_prompts_and_ids_are_explained_like_chats(server: RunningServer) -> None:
    text = f"another of this test alone. {FILLER}"
    ids = server.ask("POST", "/tokenize", {"prompt": text})[2]["tokens"]
    first = explain(server, prompt=text)
    assert first["resident_tokens"] == 0 and first["reasons"] == {"first_seen": len(ids)}
    server.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 2})
    for body in ({"prompt": text}, {"prompt": ids}, {"tokens": ids}, {"prompt": [text]}):
        told = explain(server, **body)
        assert told["resident_tokens"] == len(ids) - 1
        assert told["reasons"] == {"last_token": 1}
        assert told["divergence"] is None and told["hints"] == []
    scored = explain(server, prompt=text, echo=True, logprobs=1)
    assert scored["reasons"] == {"disabled": len(ids)}
    assert explain(server, prompt=text, cache_salt="s")["reasons"].get("namespace", 0) > 16


def test_the_place_of_a_divergence_is_named_with_both_texts(server: RunningServer) -> None:
    """DIAG-2."""
    chat(server, [SYSTEM, turn("user", FILLER + "And what is radix?")])
    told = explain(server, messages=[SYSTEM, turn("user", FILLER + "And what is a trie?")])
    place = told["divergence"]
    assert place["token"] == told["resident_tokens"]
    assert place["region"] == {
        "kind": "message", "message": 1, "role": "user", "label": "message 1 (user)",
    }  # fmt: skip
    assert place["shared_text"].endswith("what is")
    assert "trie" in place["this_text"] and "radix" in place["other_text"]
    assert set(told["reasons"]) == {"diverged"}


@pytest.mark.parametrize(
    "before, after, cause",
    [
        ("It is 2026-11-30T08:14:07Z. ", "It is 2026-11-30T08:15:00Z. ", "timestamp"),
        ("Today is 2026-11-29. ", "Today is 2026-11-30. ", "date"),
        (
            "id 7c9e6679-7425-40de-944b-e07fc1f90ae7. ",
            "id 550e8400-e29b-41d4-a716-446655440000. ",
            "uuid",
        ),
        ("Request 17. ", "Request 18. ", "counter"),
    ],
)
def test_what_changes_in_the_system_prompt_is_named(
    server: RunningServer, before: str, after: str, cause: str
) -> None:
    chat(server, [turn("system", before + FILLER), turn("user", "hello")])
    told = explain(server, messages=[turn("system", after + FILLER), turn("user", "hello")])
    assert [hint["cause"] for hint in told["hints"]] == [cause]
    assert told["divergence"]["region"]["kind"] == "system"


def test_stripped_thinking_is_named(server: RunningServer) -> None:
    """TEMPLATE-1: the report names the template region and the first differing token."""
    asked = [SYSTEM, turn("user", "hello")]
    answer = "<think>\nThe user is here.\n</think>\n\nhello you"
    chat(server, [*asked, turn("assistant", answer), turn("user", "and?")])
    history = [*asked, turn("assistant", "hello you"), turn("user", "and?")]
    told = explain(server, messages=history)
    assert [hint["cause"] for hint in told["hints"]] == ["stripped_thinking"]
    assert told["divergence"]["region"]["label"] == "message 2 (assistant)"
    assert told["divergence"]["token"] == told["resident_tokens"]


def test_retokenised_history_is_named(server: RunningServer) -> None:
    """Ids that a model may generate, and the tokenizer would not write so."""
    text = FILLER + "the user and the system"
    ids = server.ask("POST", "/tokenize", {"prompt": text})[2]["tokens"]
    single = server.ask("POST", "/tokenize", {"prompt": "t", "return_token_strs": True})[2][
        "tokens"
    ]
    spelled: list[int] = []
    for letter in "the user and the system":
        spelled += server.ask("POST", "/tokenize", {"prompt": letter})[2]["tokens"]
    assert single
    head = server.ask("POST", "/tokenize", {"prompt": FILLER})[2]["tokens"]
    server.ask("POST", "/v1/completions", {"prompt": head + spelled, "max_tokens": 2})
    told = explain(server, tokens=ids)
    assert [hint["cause"] for hint in told["hints"]] == ["retokenised"]
    assert told["divergence"]["this_text"] == told["divergence"]["other_text"][: len(
        told["divergence"]["this_text"])] or told["divergence"]["other_text"] in text  # fmt: skip


def test_a_short_retokenised_answer_is_named_where_it_stands(server: RunningServer) -> None:
    """What was generated may be shorter than the tokens that are compared, and end its turn."""
    asked = [SYSTEM, turn("user", "hello")]
    ids = server.ask("POST", "/tokenize", {"messages": asked})[2]["tokens"]
    spelled: list[int] = []
    for letter in "the":
        spelled += server.ask("POST", "/tokenize", {"prompt": letter})[2]["tokens"]
    whole = server.ask("POST", "/tokenize", {"prompt": "the"})[2]["tokens"]
    assert len(spelled) > len(whole)
    body = {"prompt": ids + spelled, "max_tokens": 1, "temperature": 0}
    assert server.ask("POST", "/v1/completions", body)[0] == 200
    told = explain(server, messages=[*asked, turn("assistant", "the"), turn("user", "and?")])
    assert [hint["cause"] for hint in told["hints"]] == ["retokenised"]
    assert told["divergence"]["token"] == len(ids)
    assert told["divergence"]["region"]["label"] == "message 2 (assistant)"
    told = explain(server, messages=[*asked, turn("assistant", "they"), turn("user", "and?")])
    assert told["hints"] == []


def test_two_characters_that_begin_with_the_same_bytes_are_shown_whole(
    server: RunningServer,
) -> None:
    """A token may be half a character: the texts part where it begins, in the message it is of."""
    chat(server, [SYSTEM, turn("user", "hello \U0001f600\U0001f600")])
    told = explain(server, messages=[SYSTEM, turn("user", "hello \U0001f600\U0001f389")])
    place = told["divergence"]
    assert place["token"] == told["resident_tokens"]
    assert place["region"]["label"] == "message 1 (user)"
    assert place["shared_text"].endswith("hello \U0001f600")
    assert place["this_text"].startswith("\U0001f389")
    assert place["other_text"].startswith("\U0001f600")
    assert told["hints"] == []


def test_white_space_is_named(server: RunningServer) -> None:
    chat(server, [turn("system", "Be  kind. " + FILLER), turn("user", "hello")])
    told = explain(server, messages=[turn("system", "Be kind. " + FILLER), turn("user", "hello")])
    assert [hint["cause"] for hint in told["hints"]] == ["whitespace"]


def test_a_template_switch_near_the_beginning_is_named(server: RunningServer) -> None:
    """TEMPLATE-2: how much is shared, and which kwarg changed."""
    tokenizer = server.engine.tokenizer
    plain = tokenizer.chat_template
    tokenizer.chat_template = (
        "{{ '<|im_start|>' + ('loud' if enable_thinking else 'quiet') + '<|im_end|>\n' }}" + plain
    )
    try:
        messages = [SYSTEM, turn("user", "hello")]
        chat(server, messages, chat_template_kwargs={"enable_thinking": True, "style": "a"})
        told = explain(
            server,
            messages=messages,
            chat_template_kwargs={"enable_thinking": False, "style": "a"},
        )
    finally:
        tokenizer.chat_template = plain
    assert told["resident_tokens"] < 8
    hints = {hint["cause"]: hint["message"] for hint in told["hints"]}
    assert "'enable_thinking'" in hints["template_kwarg"]
    assert "style" not in hints["template_kwarg"]


FUNCTION = {"name": "add", "description": "Adds two numbers to each other.", "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_are_rendered_as_sent_and_their_key_order_is_named(server: RunningServer) -> None:
    """TEMPLATE-3: same tools, other key order: other prompts, and the diagnostic says why."""
    tokenizer = server.engine.tokenizer
    plain = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}"
        "{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}" + plain
    )
    try:
        messages = [SYSTEM, turn("user", "hello")]
        render = server.engine.render
        sent = render(messages, tools=[TOOL])
        shuffled = {**TOOL, "function": dict(reversed(FUNCTION.items()))}
        assert render(messages, tools=[shuffled]) != sent
        server.ask("POST", "/v1/completions", {"prompt": sent, "max_tokens": 2})
        same = explain(server, messages=messages, tools=[TOOL])
        assert same["missing_tokens"] == 1
        told = explain(server, messages=messages, tools=[shuffled])
    finally:
        tokenizer.chat_template = plain
    assert [hint["cause"] for hint in told["hints"]] == ["tool_key_order"]
    assert told["divergence"]["region"]["kind"] == "tools"


def test_an_answer_carries_the_record_of_its_own_admission(server: RunningServer) -> None:
    messages = [SYSTEM, turn("user", "hello")]
    assert "explain" not in chat(server, messages)["radixkv"]
    reply = chat(server, messages, radixkv={"explain": True})
    record = reply["radixkv"]["explain"]
    assert record["resident_tokens"] == cached(reply) > 0
    assert record["reasons"] == {"last_token": 1}
    (lookup,) = record["lookups"]
    assert lookup["device_tokens"] == cached(reply) and lookup["resumed"] is False
    assert lookup["identity"] == record["identity"]
    assert "deterministic" in reply["radixkv"]
    body = {"messages": [SYSTEM, turn("user", "goodbye")], "max_tokens": 3}
    events = server.events(
        "/v1/chat/completions",
        body | {"radixkv": {"explain": True}, "stream_options": {"include_usage": True}},
    )
    record = events[0]["radixkv"]["explain"]
    assert [e for e in events[1:-1] if "explain" in e.get("radixkv", {})] == []
    assert record["resident_tokens"] == cached(events[-2])
    assert record["divergence"]["region"]["label"] == "message 1 (user)"


def test_a_completion_carries_it_too_but_for_one_prompt_only(server: RunningServer) -> None:
    text = f"a prompt of this test alone. {FILLER}"
    body = {"prompt": text, "max_tokens": 2, "radixkv": {"explain": True}}
    reply = server.ask("POST", "/v1/completions", body)[2]
    assert reply["radixkv"]["explain"]["reasons"] == {"first_seen": reply["usage"]["prompt_tokens"]}
    events = server.events("/v1/completions", body)
    assert events[0]["radixkv"]["explain"]["reasons"] == {"last_token": 1}
    status, _, reply = server.ask("POST", "/v1/completions", body | {"prompt": ["a", "b"]})
    assert status == 400 and reply["error"]["param"] == "radixkv.explain"


def test_openais_comparison_is_answered_from_digests(server: RunningServer) -> None:
    first = chat(server, [SYSTEM, turn("user", "hello")])
    options = {"comparison_response_id": first["id"]}
    going_on = [SYSTEM, turn("user", "hello"), turn("assistant", "you"), turn("user", "and?")]
    hit = chat(server, going_on, prompt_cache_options=options)["prompt_cache_diagnostics"]
    assert (hit["type"], hit["reason"]) == ("cache_hit", None)
    changed = [turn("system", "Other. " + FILLER), turn("user", "hello")]
    miss = chat(server, changed, prompt_cache_options=options)["prompt_cache_diagnostics"]
    assert (miss["type"], miss["reason"]) == ("cache_miss", "system_changed")
    options = {"comparison_response_id": "chatcmpl-unknown"}
    lost = chat(server, going_on, prompt_cache_options=options)["prompt_cache_diagnostics"]
    assert lost["type"] == "comparison_response_not_found"


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, None),
        ({"prompt": "a", "tokens": [1]}, None),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"tokens": [10**6]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [5] * 5000}, "tokens"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_a_body_that_cannot_be_explained_is_a_4xx(
    server: RunningServer, body: dict[str, Any], param: str | None
) -> None:
    status, _, reply = server.ask("POST", "/v1/cache/explain", body)
    assert status in (400, 404) and reply["error"]["param"] == param, reply


def test_nothing_of_another_tenant_is_told(tmp_path: Path) -> None:
    """SECURITY-1: telemetry, diagnostics and the dry run know the caller's namespace alone."""
    gate, keys = open_gate(tmp_path, alice={}, bob={}, root={"role": "admin"})
    messages = [SYSTEM, turn("user", "the secret word is xyzzy")]
    with running_server(gate=gate) as server:

        def ask(who: str, path: str, body: Any) -> Any:
            status, _, reply = server.ask("POST", path, body, headers=bearer(keys[who]))
            assert status == 200, reply
            return reply

        body = {"messages": messages, "max_tokens": 2}
        first = ask("alice", "/v1/chat/completions", body)
        guess = {"messages": messages[:1] + [turn("user", "the secret word is what")]}
        for who in ("bob", "root"):
            for asked in (body, guess, guess | {"cache_salt": "alice", "user": "alice"}):
                told = ask(who, "/v1/cache/explain", asked)
                assert set(told["reasons"]) == {"first_seen"}, "as if nobody had ever asked"
                assert told["resident_tokens"] == 0
                assert told["divergence"] is None and told["differs_in"] == []
                assert "xyzzy" not in str(told)
            options = {"comparison_response_id": first["id"]}
            reply = ask(
                who,
                "/v1/chat/completions",
                guess | {"max_tokens": 2, "prompt_cache_options": options}
                | {"cache_salt": f"only {who}", "radixkv": {"explain": True}},
            )  # fmt: skip
            assert reply["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"
            assert reply["radixkv"]["explain"]["resident_tokens"] == 0
        mine = ask("alice", "/v1/cache/explain", guess)
        assert mine["resident_tokens"] > 100, "alice herself is told"
        assert "xyzzy" in mine["divergence"]["other_text"]


def test_one_salt_of_a_tenant_is_not_told_what_another_has(tmp_path: Path) -> None:
    """SECURITY-1: neither by the dry run nor by an answer; without a salt the tenant is."""
    gate, keys = open_gate(tmp_path, alice={}, root={"role": "admin"})
    body = {"messages": [SYSTEM, turn("user", "the secret word is xyzzy")]}
    with running_server(gate=gate) as server:

        def ask(who: str, path: str, **extra: Any) -> Any:
            status, _, reply = server.ask("POST", path, body | extra, headers=bearer(keys[who]))
            assert status == 200, reply
            return reply

        for who in keys:
            ask(who, "/v1/chat/completions", max_tokens=2, cache_salt="theirs")
        hidden = ask("alice", "/v1/cache/explain", cache_salt="mine")
        assert set(hidden["reasons"]) == {"first_seen"} and hidden["differs_in"] == []
        reply = ask("alice", "/v1/chat/completions", cache_salt="mine", radixkv={"explain": True})
        assert reply["radixkv"]["explain"]["reasons"] == hidden["reasons"]
        told = ask("root", "/v1/cache/explain", cache_salt="mine")
        assert told["reasons"]["namespace"] > 16
        told = ask("alice", "/v1/cache/explain")
        assert told["reasons"]["namespace"] > 16 and told["differs_in"] == ["namespace.salt"]


def test_a_preempted_requests_trace_lists_each_look_up_and_usage_reports_the_first() -> None:
    """DIAG-1, USAGE-3."""
    with running_server(
        kv_memory="80KiB", lookahead_tokens=0, max_num_seqs=4, swap_memory=0
    ) as small:
        prompts = [[3 + (i * 37 + j * 11) % 300 for j in range(40)] for i in range(6)]

        def run(prompt: list[int]) -> Any:
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True}
            return small.ask("POST", "/v1/completions", body | {"radixkv": {"explain": True}})[2]

        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(run, prompts))
        traces = [reply["radixkv"]["explain"]["lookups"] for reply in replies]
        for reply, trace in zip(replies, traces, strict=True):
            record = reply["radixkv"]["explain"]
            assert trace[0]["device_tokens"] == record["resident_tokens"] == cached(reply)
            assert [lookup["resumed"] for lookup in trace] == [False] + [True] * (len(trace) - 1)
            assert {lookup["identity"] for lookup in trace} == {record["identity"]}
            assert all(lookup["stopped"] for lookup in trace)
        assert max(map(len, traces)) > 1, "somebody was preempted"
