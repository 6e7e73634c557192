"""Calls of functions over OpenAI's chats: forced and free, whole and streamed, and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from radixkv.service.http.replies import ChatChunk, ChatReply
from tests.http_server import RunningServer, running_server
from tests.scripted import saying
from tests.tool_cases import ADD, WEATHER

TEMPLATE = str(Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja")
HI: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOLS = [WEATHER, ADD]
CHAT = "/v1/chat/completions"
SAID = [
    "Let me", " see.\n", "<tool_", 'call>\n{"name": "add", "arg', 'uments": {"a": ',
    "7}}\n</tool_call>", '\n<tool_call>\n{"name": "get_weather", "arguments": ',
    '{"city": "Oslo", "days": 1}}\n</tool_call>',
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(chat_template=TEMPLATE, max_model_len=4096) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    """A server whose template knows no tools."""
    with running_server() as server:
        yield server


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "tools": TOOLS, "max_tokens": 120, "temperature": 0} | fields


def ask(server: RunningServer, **fields: Any) -> Any:
    status, _, reply = server.ask("POST", CHAT, body(**fields))
    assert status == 200, reply
    assert TypeAdapter(ChatReply).validate_python(reply, strict=True) == reply
    return reply


def refused(server: RunningServer, **fields: Any) -> Any:
    status, _, reply = server.ask("POST", CHAT, body(**fields))
    assert status == 400, reply
    return reply["error"]


def made(message: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_required_call_is_made_and_keeps_to_its_schema(server: RunningServer) -> None:
    """A random model would never do so by itself."""
    reply = ask(server, tool_choice="required", parallel_tool_calls=False)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    ((name, arguments),) = made(choice["message"])
    if name == "add":
        assert set(arguments) == {"a"} and 0 <= arguments["a"] <= 9
    else:
        assert arguments["city"] in ("Paris", "Oslo") and 1 <= arguments["days"] <= 3
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "add"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "add"}}],
            },
        },
    ],
)
def test_a_named_function_is_called(server: RunningServer, choice: Any) -> None:
    reply = ask(server, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=3)
    assert [name for name, _ in made(reply["choices"][0]["message"])] == ["add"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_openais_client_reads_a_streamed_call(server: RunningServer) -> None:
    with server.client().chat.completions.stream(
        model="tiny",
        messages=HI,  # type: ignore[arg-type]
        tools=[ADD],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1
    call = calls[0]
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_each_of_several_choices_calls(server: RunningServer) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "temperature": 1}
    for choice in ask(server, seed=1, **fields)["choices"]:
        assert choice["finish_reason"] == "tool_calls" and len(made(choice["message"])) == 1
    events = server.events(CHAT, body(seed=1, **fields))[:-1]
    for index in (0, 1):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in mine][-1] == "tool_calls"
        assert len([c for c in mine if c["delta"].get("tool_calls", [{}])[0].get("id")]) == 1


def test_calls_that_a_model_makes_are_found_among_its_words(server: RunningServer) -> None:
    with saying(server, SAID) as asked:
        (choice,) = ask(server)["choices"]
    assert asked[0].grammar is None  # free to say what it likes
    assert choice["message"]["content"] == "Let me see."
    assert made(choice["message"]) == [
        ("add", {"a": 7}),
        ("get_weather", {"city": "Oslo", "days": 1}),
    ]
    assert choice["finish_reason"] == "tool_calls"
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2


def test_a_stream_says_the_name_first_and_then_the_arguments_as_they_come(
    server: RunningServer,
) -> None:
    with saying(server, SAID):
        events = server.events(CHAT, body())
    assert events.pop() == "[DONE]"
    for event in events:
        assert TypeAdapter(ChatChunk).validate_python(event, strict=True) == event
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    first = [call for call in calls if call["index"] == 0]
    assert first[0]["function"] == {"name": "add", "arguments": ""} and first[0]["id"]
    assert [call["function"] for call in first[1:]] == [
        {"arguments": '{"a": '},
        {"arguments": "7}"},
    ]
    assert all("id" not in call for call in first[1:])
    second = "".join(c["function"]["arguments"] for c in calls if c["index"] == 1)
    assert json.loads(second) == {"city": "Oslo", "days": 1}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]


def test_token_ids_are_all_in_a_stream_of_calls(server: RunningServer) -> None:
    with saying(server, SAID):
        events = server.events(CHAT, body(return_token_ids=True))[:-1]
    ids = [i for event in events for i in event["choices"][0].get("token_ids", ())]
    assert ids == list(range(len(SAID)))


def test_a_call_that_is_no_call_is_text(server: RunningServer) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": oops}}\n</tool_call>'
    with saying(server, [text]):
        (choice,) = ask(server)["choices"]
        events = server.events(CHAT, body())[:-1]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_is_not_one_that_can_be_made(server: RunningServer) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": '
    with saying(server, [text], finish="length"):
        (choice,) = ask(server)["choices"]
        events = server.events(CHAT, body())[:-1]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "length"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_one_call_is_told_where_one_was_asked_for(server: RunningServer) -> None:
    with saying(server, SAID):
        (choice,) = ask(server, parallel_tool_calls=False)["choices"]
        events = server.events(CHAT, body(parallel_tool_calls=False))[:-1]
    assert [name for name, _ in made(choice["message"])] == ["add"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert {d["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d} == {0}


def test_with_the_choice_none_tools_are_shown_and_answers_are_text(server: RunningServer) -> None:
    with saying(server, SAID):
        none = ask(server, tool_choice="none")
        auto = ask(server)
    assert none["choices"][0]["message"]["content"] == "".join(SAID)
    assert none["choices"][0]["finish_reason"] == "stop"
    assert none["usage"]["prompt_tokens"] == auto["usage"]["prompt_tokens"]


def test_a_strict_function_and_allowed_ones_keep_free_answers_to_a_grammar(
    server: RunningServer,
) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    }
    with saying(server, ["hello"]) as asked:
        ask(server, tools=[WEATHER, strict])
        ask(server, tool_choice=allowed)
        ask(server, response_format={"type": "json_object"})
    assert [params.grammar.kind for params in asked] == ["lark"] * 3
    assert "get_weather" in asked[0].grammar.source
    assert "get_weather" not in asked[1].grammar.source
    assert "answer" in asked[2].grammar.source
    reply = ask(server, tools=[strict], max_tokens=8)  # and the engine takes such a grammar
    assert reply["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_a_call_comes_back_as_the_same_tokens_so_that_the_next_turn_finds_it(
    server: RunningServer,
) -> None:
    """The whole answer is cached, not only the prompt before it."""
    first = ask(server, tool_choice="required", parallel_tool_calls=False, return_token_ids=True)
    (choice,) = first["choices"]
    (call,) = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "it is so"}
    history = [*HI, choice["message"], result]
    prompt = server.ask("POST", "/tokenize", {"messages": history, "tools": TOOLS})[2]["tokens"]
    before = first["prompt_token_ids"] + choice["token_ids"]
    said = server.engine.detokenize(before)
    assert server.engine.detokenize(prompt).startswith(said)
    again = ask(server, messages=history, max_tokens=2, tool_choice="none")
    # A forced answer may be spelled in other tokens than the tokenizer would choose.
    shared = next(i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b) \
        if prompt[: len(before)] != before else len(before)  # fmt: skip
    assert cached(again) >= min(shared, len(before) - 1) >= len(first["prompt_token_ids"])


def test_tools_are_explained_and_counted_like_the_rest_of_the_prompt(server: RunningServer) -> None:
    """DIAG-2, DIAG-3: one changed description: how much is lost, where, and why."""
    other = {"type": "function", "function": {**ADD["function"], "description": "Adds."}}
    first = ask(server, max_tokens=2)
    asked = {"messages": HI, "tools": [WEATHER, other]}
    status, _, told = server.ask("POST", "/v1/cache/explain", asked)
    assert status == 200 and told["divergence"]["region"]["kind"] == "tools"
    options = {"comparison_response_id": first["id"]}
    changed = ask(
        server,
        tools=[WEATHER, other],
        max_tokens=2,
        prompt_cache_options=options,
        radixkv={"explain": True},
    )
    assert told["resident_tokens"] == cached(changed)
    assert told["prompt_tokens"] == changed["usage"]["prompt_tokens"]
    assert changed["prompt_cache_diagnostics"]["reason"] == "tools_changed"
    assert changed["radixkv"]["explain"]["divergence"]["region"]["kind"] == "tools"
    again = ask(server, tools=[WEATHER, other], max_tokens=2)
    assert cached(again) == again["usage"]["prompt_tokens"] - 1


def test_the_order_of_keys_is_the_clients_own(server: RunningServer) -> None:
    """TEMPLATE-3: other key order, other prompt; the diagnostic says so."""
    function = dict(reversed(WEATHER["function"].items()))
    shuffled = {"type": "function", "function": function}
    first = ask(server, tools=[WEATHER], max_tokens=2)
    status, _, told = server.ask("POST", "/v1/cache/explain", {"messages": HI, "tools": [shuffled]})
    assert status == 200
    assert [hint["cause"] for hint in told["hints"]] == ["tool_key_order"]
    sent = {"messages": HI, "tools": [shuffled], "return_token_strs": True}
    text = "".join(server.ask("POST", "/tokenize", sent)[2]["token_strs"])
    assert json.dumps(shuffled) in text.replace("Ġ", " ")
    assert first["usage"]["prompt_tokens"] == told["prompt_tokens"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": "f"}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*HI, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
         "messages[0].tool_calls"),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}]},
         "messages[1].tool_calls[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "a"}}}],
          "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [ADD], "structured_outputs": {"regex": "a+"}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters":
          {"type": "object", "properties": {"a": {"type": "x"}}}}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refused(server, **fields)["param"] == param


def test_a_public_prompt_may_have_tools(server: RunningServer) -> None:
    """What all tenants' agents begin with: it is found under any salt."""
    system = {"role": "system", "content": "the system of this test alone"}
    asked = {"messages": [system], "tools": [ADD]}
    status, _, public = server.ask("POST", "/v1/cache/public", asked)
    assert status == 200, public
    reply = ask(server, messages=[system, *HI], tools=[ADD], max_tokens=1, cache_salt="another")
    assert cached(reply) >= public["tokens"] > 300
    server.ask("DELETE", f"/v1/cache/public/{public['id']}")


def test_a_template_without_a_place_for_tools_says_what_to_do(plain: RunningServer) -> None:
    error = refused(plain)
    assert error["param"] == "tools"
    assert "--chat-template" in error["message"]
    assert "examples/templates/chatml_tools.jinja" in error["message"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = refused(plain, tools=None, messages=[*HI, calling])
    assert error["param"] == "messages" and "--chat-template" in error["message"]


def test_a_way_to_write_calls_that_nobody_knows_is_said_so(plain: RunningServer) -> None:
    tokenizer = plain.engine.tokenizer
    own = tokenizer.chat_template
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + own
    try:
        error = refused(plain)
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        with saying(plain, ["hello"]):
            assert ask(plain, tool_choice="none")["choices"][0]["message"]["content"] == "hello"
    finally:
        tokenizer.chat_template = own


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        "<tool_call>",
        "\ufffd",
    ],
)
def test_no_answer_to_tools_is_ever_a_500(server: RunningServer, text: str) -> None:
    with saying(server, [text]):
        assert ask(server)["choices"][0]["message"]["content"] == text
        assert server.events(CHAT, body())[-1] == "[DONE]"
