"""What changed between two prompts, in Anthropic's and OpenAI's words, from digests alone."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import pytest

from radixkv.service.engine.params import Usage
from radixkv.service.http import past_prompts as module
from radixkv.service.http.diagnostics import anthropic_diagnostics, openai_diagnostics
from radixkv.service.http.past_prompts import (
    PromptMemory,
    PromptSections,
    compare,
    sections_of,
)

TOOL = {"name": "add", "description": "Adds two numbers."}
OTHER_TOOL = {"name": "sub", "description": "Subtracts."}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


FIRST = [turn("system", "Be brief. " * 20), turn("user", "What is radix?")]
SECOND = [*FIRST, turn("assistant", "A base."), turn("user", "And a trie?")]


def sections(messages: list[dict[str, str]] = SECOND, **parts: Any) -> PromptSections:
    return sections_of(**({"model": "tiny", "messages": messages} | parts))


def remembered(earlier: PromptSections) -> PromptMemory:
    memory = PromptMemory()
    memory.remember("a", "msg_1", earlier)
    return memory


def test_a_chat_that_goes_on_has_no_divergence() -> None:
    memory = remembered(sections(FIRST))
    usage = Usage(100, 5, 95)
    found = anthropic_diagnostics(memory, "a", "msg_1", sections(), usage)
    assert found == {"cache_miss_reason": None}
    reply = openai_diagnostics(memory, "a", "msg_1", sections(), usage)
    assert (reply["type"], reply["reason"], reply["cache_missed_tokens"]) == ("cache_hit", None, 5)
    assert reply["comparison_reusable_tokens"] >= 95


@pytest.mark.parametrize(
    "kind, later",
    [
        ("model_changed", sections(model="tiny:adapter")),
        ("tools_changed", sections(tools=[TOOL | {"description": "Sums two numbers."}])),
        ("tools_changed", sections(tools=None)),
        ("system_changed", sections([turn("system", "Be long."), *SECOND[1:]], tools=[TOOL])),
        ("messages_changed", sections([FIRST[0], turn("user", "What is a trie?")], tools=[TOOL])),
    ],
)
def test_the_first_section_that_changed_is_named(kind: str, later: PromptSections) -> None:
    """DIAG-2: two requests that differ in one tool's description are told apart as such."""
    memory = remembered(sections(FIRST, tools=[TOOL]))
    usage = Usage(100, 5, 10)
    found = anthropic_diagnostics(memory, "a", "msg_1", later, usage)
    assert found == {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": 90}}
    reply = openai_diagnostics(memory, "a", "msg_1", later, usage)
    assert (reply["type"], reply["reason"]) == ("cache_miss", kind)


def test_an_unknown_answer_is_said_to_be_unknown_and_a_first_turn_is_compared_with_nothing() -> (
    None
):
    memory = remembered(sections(FIRST))
    found = anthropic_diagnostics(memory, "a", "msg_2", sections(), Usage(100, 5, 0))
    assert found["cache_miss_reason"] is not None
    assert found["cache_miss_reason"]["type"] == "previous_message_not_found"
    reply = openai_diagnostics(memory, "a", "msg_2", sections(), Usage(100, 5, 0))
    assert reply["type"] == "comparison_response_not_found"
    none = anthropic_diagnostics(memory, "a", None, sections(), Usage(100, 5, 0))
    assert none == {"cache_miss_reason": None}


def test_another_tenants_answers_and_other_salts_are_unknown() -> None:
    """SECURITY-1: the diagnostics answer for the caller's own prompts alone."""
    memory = remembered(sections(FIRST))
    for tenant, later in (("b", sections()), ("a", sections(salt="s"))):
        reply = openai_diagnostics(memory, tenant, "msg_1", later, Usage(100, 5, 0))
        assert reply["type"] == "comparison_response_not_found"
    assert memory.nearest("b", sections()) is None
    assert memory.nearest("a", sections(salt="s")) is None


def test_an_unchanged_prompt_that_was_not_resident_is_no_fault_of_the_client() -> None:
    memory = remembered(sections(FIRST))
    found = anthropic_diagnostics(memory, "a", "msg_1", sections(), Usage(100, 5, 0))
    assert found["cache_miss_reason"] is not None
    assert found["cache_miss_reason"]["type"] == "unavailable"
    reply = openai_diagnostics(memory, "a", "msg_1", sections(), Usage(100, 5, 0))
    assert (reply["type"], reply["reason"]) == ("cache_miss", "not_resident")
    off = openai_diagnostics(memory, "a", "msg_1", sections(), Usage(100, 5, 0), enabled=False)
    assert off["type"] == "unavailable"


def test_a_shortened_chat_has_not_changed() -> None:
    assert compare(sections(SECOND), sections(FIRST)).changed is None


def test_the_order_of_tools_and_of_their_keys_is_told_from_a_change() -> None:
    """TEMPLATE-3: tools are compared as sent, and the hint says that only their order differs."""
    both = sections(tools=[TOOL, OTHER_TOOL])
    keys = compare(both, sections(tools=[dict(reversed(TOOL.items())), OTHER_TOOL]))
    order = compare(both, sections(tools=[OTHER_TOOL, TOOL]))
    other = compare(both, sections(tools=[TOOL, OTHER_TOOL | {"strict": "yes"}]))
    assert [keys.changed, order.changed, other.changed] == ["tools_changed"] * 3
    assert [h.cause for h in keys.hints] == ["tool_key_order"]
    assert [h.cause for h in order.hints] == ["tool_order"]
    assert other.hints == ()


def test_a_template_switch_is_named() -> None:
    """TEMPLATE-2: the report says which of chat_template_kwargs changed."""
    memory = remembered(sections(FIRST, kwargs={"enable_thinking": True, "style": "x"}))
    later = sections(SECOND, kwargs={"enable_thinking": False, "style": "x"})
    found = memory.nearest("a", later)
    assert found is not None
    (hint,) = found.hints
    assert hint.cause == "template_kwarg"
    assert "enable_thinking" in hint.message and "style" not in hint.message


def test_the_nearest_prompt_is_the_latest_that_shares_most() -> None:
    memory = PromptMemory()
    memory.remember("a", "1", sections(SECOND, kwargs={"x": 1}))
    memory.remember("a", "2", sections(FIRST, kwargs={"x": 2}))
    memory.remember("a", "3", sections([turn("user", "Something else.")]))
    found = memory.nearest("a", sections(SECOND, kwargs={"x": 2}))
    assert found is not None and found.hints[0].cause == "template_kwarg"
    found = memory.nearest("a", sections(FIRST, kwargs={"x": 2}))
    assert found is not None and found.hints == ()


def test_memory_holds_digests_only_and_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 3)
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    memory = PromptMemory()
    for i in range(10):
        memory.remember("a", f"id{i}", sections([turn("user", "xyzzy-secret")], salt="plugh-salt"))
    assert memory.recall("a", "id6", sections(salt="plugh-salt")) is None
    assert memory.recall("a", "id7", sections(salt="plugh-salt")) is not None
    dump = pickle.dumps(memory)
    assert b"secret" not in dump and b"plugh" not in dump
    memory.remember("b", "1", sections())
    memory.remember("c", "1", sections())
    assert memory.recall("a", "id9", sections(salt="plugh-salt")) is None, "the idlest tenant goes"


def test_all_that_is_remembered_is_bounded_in_bytes_and_the_loud_forget_first() -> None:
    """Many long chats of many tenants take no more than they may; a quiet tenant keeps its own."""
    memory = PromptMemory(max_bytes=200_000)
    memory.remember("quiet", "mine", sections(FIRST))
    for i in range(60):
        chat = [turn("user", f"{i} {j}") for j in range(150)]
        memory.remember(f"loud {i % 3}", f"id{i}", sections(chat))
        assert memory.num_bytes <= 200_000
        assert memory.recall(f"loud {i % 3}", f"id{i}", sections(chat)) is not None
    assert memory.num_bytes > 150_000
    assert memory.recall("quiet", "mine", sections(FIRST)) is not None
    assert memory.recall("loud 0", "id0", sections()) is None


def test_what_a_prompt_takes_is_counted_as_it_is() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = [sections([turn("user", f"{i} {j}") for j in range(500)]) for i in range(20)]
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * took < sum(each.num_bytes for each in found) < 1.5 * took


def test_a_very_long_chat_is_digested_in_bounded_memory() -> None:
    long = [turn("user", str(i)) for i in range(module.MAX_MESSAGES + 500)]
    found = sections(long)
    assert len(found.messages) == module.MAX_MESSAGES + 1
    assert compare(found, sections([*long[:-1], turn("user", "x")])).changed == "messages_changed"
