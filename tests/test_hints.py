"""Common causes told from two texts, and none where nothing is certain."""

from __future__ import annotations

import json

import pytest

from radixkv.service.engine.regions import Region, common_chars
from radixkv.service.hints import Fork, find_hints

SYSTEM = Region("system", 0, "system")
TOOLS = Region("tools")
USER = Region("message", 1, "user")
ASSISTANT = Region("message", 2, "assistant")


def fork_of(mine: str, other: str) -> Fork:
    at = common_chars(mine, other)
    return Fork(mine[:at], mine[at:], other[at:])


def causes(mine: str, other: str, region: Region) -> list[str]:
    return [hint.cause for hint in find_hints(fork_of(mine, other), region)]


@pytest.mark.parametrize(
    "cause, mine, other",
    [
        ("timestamp", "It is 2026-11-30T08:14:07Z. Be kind.", "It is 2026-11-30T08:15:01Z. Be."),
        ("timestamp", "Time: 8:14 PM. Be brief.", "Time: 8:20 PM. Be brief."),
        ("timestamp", "now=1796026447", "now=1796026501"),
        (
            "timestamp",
            "It is Mon Nov 30 15:22:46 UTC 2026. Be kind.",
            "It is Tue Dec  1 09:00:01 UTC 2026. Be kind.",
        ),
        ("timestamp", "It is Sun Nov 29 15:22:46 2026.", "It is Mon Nov 30 15:22:46 2026."),
        ("date", "Today is Monday. Be brief.", "Today is Thursday. Be brief."),
        ("date", "Today is 2026-11-30.", "Today is 2026-12-01."),
        ("date", "Today is 30 Nov 2026.", "Today is 29 Nov 2026."),
        ("date", "Today is Monday, November 30, 2026.", "Today is Tuesday, December 1, 2026."),
        (
            "uuid",
            "id 7c9e6679-7425-40de-944b-e07fc1f90ae7 end",
            "id 7c9e6679-7425-40de-944b-e07fc1f90ae8 end",
        ),
        ("random_id", "run 0123456789abcdef: go", "run 0123456789fedcba: go"),
        ("counter", "Request 41 of this session", "Request 42 of this session"),
        ("counter", "Request 9 of this session", "Request 10 of this session"),
        ("counter", "Request 1 of this session", "Request 12 of this session"),
    ],
)
def test_a_value_that_changes_in_the_system_prompt_is_named(
    cause: str, mine: str, other: str
) -> None:
    assert causes(mine, other, SYSTEM) == [cause]


def test_what_users_ask_is_no_fault_unless_all_behind_it_is_the_same() -> None:
    assert causes("What is 12 times 7?", "What is 13 minus 2?", USER) == []
    same = " and please answer in one short sentence."
    assert causes("It is 08:14 now" + same, "It is 08:15 now" + same, USER) == ["timestamp"]


def test_two_different_prompts_have_no_cause() -> None:
    assert causes("You are a pirate. Answer so.", "You are a judge. Answer so.", SYSTEM) == []


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "strict": True}}
SHUFFLED = {"function": {"strict": True, "description": "Adds.", "name": "add"}, "type": "function"}


def test_keys_of_tools_in_another_order_are_named() -> None:
    """TEMPLATE-3."""
    head, tail = "<|im_start|>system\n# Tools\n", "<|im_end|>\n"
    mine, other = head + json.dumps([TOOL]) + tail, head + json.dumps([SHUFFLED]) + tail
    assert causes(mine, other, TOOLS) == ["tool_key_order"]
    assert causes(mine, other, USER) == ["json_key_order"]


def test_a_tool_that_says_something_else_is_no_matter_of_order() -> None:
    changed = json.dumps([TOOL]).replace("Adds.", "Sums.")
    assert causes(json.dumps([TOOL]), changed, TOOLS) == []


def test_json_with_other_spaces_is_white_space() -> None:
    mine, other = json.dumps([TOOL]), json.dumps([TOOL], separators=(",", ":"))
    assert causes(mine, other, TOOLS) == ["whitespace"]


def test_stripped_thinking_is_named_on_either_side() -> None:
    """TEMPLATE-1."""
    head = "<|im_start|>assistant\n"
    thought, bare = head + "<think>\nhm\n</think>\n\nFour.", head + "Four.<|im_end|>"
    assert causes(thought, bare, ASSISTANT) == ["stripped_thinking"]
    assert causes(bare, thought, ASSISTANT) == ["stripped_thinking"]
    assert causes(head + "<thing>", head + "<think>", ASSISTANT) == ["stripped_thinking"]
    assert causes(head + "Four.", head + "Five.", ASSISTANT) == []
    # Another role, or another beginning, is what differs here.
    assert causes("<|im_start|>user\nAnd?", "<|im_start|>assistant\n<think>\nhm", ASSISTANT) == []
    assert causes(head + "So: <think>hm", head + "Well, four it is.", ASSISTANT) == []


def test_white_space_alone_is_named() -> None:
    assert causes("Be kind.  Be brief.\nGo on.", "Be kind. Be brief.\nGo on.", SYSTEM) == [
        "whitespace"
    ]
    assert causes("Be kind.\r\nBe brief, always.", "Be kind.\nBe brief, always.", SYSTEM) == [
        "whitespace"
    ]
    assert causes("Be kind. A", "Be kind.\nB", SYSTEM) == []


def test_the_same_text_under_other_ids_is_said_by_whoever_saw_the_ids() -> None:
    (hint,) = find_hints(Fork("a", "b", "b"), ASSISTANT, retokenised=True)
    assert hint.cause == "retokenised" and "tokens" in hint.message
