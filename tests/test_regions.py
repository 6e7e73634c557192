"""Which part of a chat a character of its rendered text belongs to, for templates of all kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.service.engine.regions import Messages, Region, common_chars, region_at

TOOLS = [{"name": "add", "description": "Adds."}, {"name": "sub", "description": "Subtracts."}]


def chatml(messages: Messages) -> str:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def trims(messages: Messages) -> str:
    """As Llama 3's: a date before everything, contents without white space around them."""
    head = "<|begin|>Today Date: 30 Nov 2026\n"
    turns = [f"<|{m['role']}|>\n\n{str(m['content']).strip()}<|eot|>" for m in messages]
    return head + "".join(turns) + "<|assistant|>\n\n"


def strips_thinking(messages: Messages) -> str:
    """As Qwen 3's: what was thought before the last question is left out."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    shown = [
        {**m, "content": re.sub(r"<think>.*?</think>\n*", "", m["content"], flags=re.S)}
        if m["role"] == "assistant" and i < last
        else m
        for i, m in enumerate(messages)
    ]
    return chatml(shown)


def with_tools(tools: Sequence[Any] | None) -> Callable[[Messages], str]:
    """As Qwen 2.5's: tools at the end of the system message."""

    def render(messages: Messages) -> str:
        text = f"<|im_start|>system\n{messages[0]['content']}"
        if tools:
            text += "\n\n# Tools\n" + "\n".join(json.dumps(tool) for tool in tools)
        return text + "<|im_end|>\n" + chatml(messages[1:])

    return render


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = [
    turn("system", "Be brief."),
    turn("user", "What is a trie?"),
    turn("assistant", "<think>\nA tree.\n</think>\n\nA tree of prefixes."),
    turn("user", "And radix?"),
]


def at(text: str, piece: str, render: Callable[[Messages], str] = chatml) -> Region:
    return region_at(text.index(piece), text, CHAT, render)


@pytest.mark.parametrize("render", [chatml, trims, strips_thinking])
def test_each_part_of_a_chat_is_found(render: Callable[[Messages], str]) -> None:
    text = render(CHAT)
    assert at(text, "Be brief", render) == Region("system", 0, "system")
    assert at(text, "a trie?", render) == Region("message", 1, "user")
    assert at(text, "of prefixes", render) == Region("message", 2, "assistant")
    assert at(text, "And radix", render) == Region("message", 3, "user")
    header = text.index("user", text.index("Be brief"))
    assert region_at(header, text, CHAT, render) == Region("role_header", 1, "user")
    last = text.rindex("assistant")
    assert region_at(last, text, CHAT, render) == Region("generation_prompt")
    assert region_at(0, text, CHAT, render) == Region("role_header", 0, "system")


def test_a_divergence_where_thinking_was_stripped_is_in_the_answer() -> None:
    """TEMPLATE-1: named as the message whose rendering changed, not as what comes after it."""
    before, after = strips_thinking(CHAT[:3] + [CHAT[1]]), strips_thinking(CHAT)
    sent = chatml(CHAT)
    fork = common_chars(sent, after)
    assert region_at(fork, after, CHAT, strips_thinking) == Region("message", 2, "assistant")
    assert before != after


def test_a_date_that_the_template_writes_belongs_to_the_first_header() -> None:
    text = trims(CHAT)
    assert at(text, "30 Nov", trims) == Region("role_header", 0, "system")


def test_tools_are_told_from_the_system_prompt_around_them() -> None:
    render = with_tools(TOOLS)
    text = render(CHAT)

    def find(piece: str) -> Region:
        return region_at(text.index(piece), text, CHAT, render, lambda: with_tools(None)(CHAT))

    assert find("Subtracts") == Region("tools")
    assert find('"add"') == Region("tools")
    assert find("Be brief") == Region("system", 0, "system")
    assert find("a trie?") == Region("message", 1, "user")


def test_calls_belong_to_the_message_that_makes_them() -> None:
    def render(messages: Messages) -> str:
        return "".join(
            f"<{m['role']}>{m['content']}"
            + "".join(f"[{call['function']['name']}]" for call in m.get("tool_calls", ()))
            + "</>\n"
            for m in messages
        )

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {}}}
    for said in ("", "So:"):
        calling: dict[str, Any] = {**turn("assistant", said), "tool_calls": [call, call]}
        chat: list[dict[str, Any]] = [turn("user", "one?"), calling, turn("tool", "two")]
        text = render(chat)
        for place in (text.index("[add]") + 1, text.rindex("[add]") + 1):
            assert region_at(place, text, chat, render) == Region("message", 1, "assistant")
        assert region_at(text.index("two"), text, chat, render) == Region("message", 2, "tool")
        assert region_at(text.index("<tool>"), text, chat, render).kind == "role_header"


def test_an_empty_message_and_equal_messages_are_told_apart() -> None:
    chat = [turn("user", ""), turn("assistant", "x"), turn("user", "x")]
    text = chatml(chat)
    first, second = text.index("x<"), text.rindex("x<")
    assert region_at(first, text, chat, chatml) == Region("message", 1, "assistant")
    assert region_at(second, text, chat, chatml) == Region("message", 2, "user")
    assert region_at(text.index("<|im_end|>"), text, chat, chatml).kind == "role_header"


@given(
    st.lists(st.tuples(st.sampled_from(("user", "assistant")), st.text(max_size=30)), min_size=1),
    st.data(),
)
def test_every_character_of_a_content_is_found_in_its_message(
    turns: list[tuple[str, str]], data: st.DataObject
) -> None:
    chat = [turn(role, content) for role, content in turns]
    text, start = chatml(chat), 0
    index = data.draw(st.integers(0, len(chat) - 1))
    for message in chat[:index]:
        start += len(chatml([message])) - len("<|im_start|>assistant\n")
    start += len(f"<|im_start|>{chat[index]['role']}\n")
    content = chat[index]["content"]
    if content:
        place = data.draw(st.integers(0, len(content) - 1))
        found = region_at(start + place, text, chat, chatml)
        assert found == Region("message", index, chat[index]["role"])


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_the_common_prefix_is_the_longest(head: str, a: str, b: str) -> None:
    one, two = head + a, head + b
    length = common_chars(one, two)
    assert one[:length] == two[:length] and length >= len(head)
    assert length in (len(one), len(two)) or one[length] != two[length]
