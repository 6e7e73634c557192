"""Where a message ends, in tokens of the whole prompt, whatever the template writes around it."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.boundaries import Cut, render_cut
from radixkv.service.engine.prompting import Prompting
from tests.tiny_models import build_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be the system"},
    {"role": "user", "content": "hello you\nand the user"},
]
# Like Gemma's and Mistral's: no turn of the system alone, and turns must alternate.
STRICT = (
    "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('wants a user') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['content'] | trim }}{% endfor %}"
)
# The history is shown in another way than the last turn, as where thinking is taken out.
CHANGING = (
    "{% for m in messages %}<|im_start|>{{ 'last ' if loop.last else 'old ' }}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)


def prompting(template: str | None = None) -> Prompting:
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return Prompting(tokenizer, len(tokenizer))


def before(p: Prompting, cut: Cut, messages: Any = CHAT, **rendering: Any) -> str:
    """The text of the tokens that come before ``cut``; they must begin the prompt's own."""
    ids, (at,) = render_cut(p, messages, [cut], **rendering)
    assert ids == p.render(messages, **rendering)
    return str(p._tokenizer.decode(ids[:at]))


def test_without_cuts_it_is_the_plain_rendering() -> None:
    p = prompting()
    assert render_cut(p, CHAT, []) == (p.render(CHAT), [])


def test_a_whole_message_ends_where_the_next_begins() -> None:
    p = prompting()
    assert before(p, Cut(0)) == "<|im_start|>system\nbe the system<|im_end|>\n"
    assert before(p, Cut(1)).endswith("and the user<|im_end|>\n")


def test_a_part_ends_inside_its_message() -> None:
    p = prompting()
    system = "<|im_start|>system\nbe the system<|im_end|>\n"
    assert before(p, Cut(1, "hello you")) == f"{system}<|im_start|>user\nhello you"


def test_several_cuts_are_found_at_once_and_in_any_order() -> None:
    p = prompting()
    ids, (whole, first, part) = render_cut(p, CHAT, [Cut(1), Cut(0), Cut(1, "hello you")])
    assert 0 < first < part < whole < len(ids)


def test_a_token_across_the_cut_is_behind_it() -> None:
    p = prompting()
    chat = [{"role": "user", "content": "to the user"}]
    assert p.tokenize(" the", add_special_tokens=False) != p.tokenize(
        " t", add_special_tokens=False
    ) + p.tokenize("he", add_special_tokens=False)
    assert before(p, Cut(0, "to t"), chat) == "<|im_start|>user\nto"


def test_a_template_that_refuses_the_beginning_alone_is_asked_with_other_words() -> None:
    p = prompting(STRICT)
    with pytest.raises(InvalidRequest):
        p.render(CHAT[:1])
    assert before(p, Cut(0)) == "<|im_start|>be the system"
    assert before(p, Cut(1, "hello you")) == "<|im_start|>be the system<|im_start|>hello you"


def test_what_the_template_writes_otherwise_once_more_follows_ends_before_that() -> None:
    p = prompting(CHANGING)
    assert before(p, Cut(0)) == "<|im_start|>"
    assert before(p, Cut(1)).endswith("and the user<|im_end|>")


def test_a_message_that_is_left_open_ends_with_its_text() -> None:
    p = prompting()
    chat = [*CHAT, {"role": "assistant", "content": "the answer"}]
    rendering = {"add_generation_prompt": False, "continue_final_message": True}
    assert before(p, Cut(2), chat, **rendering).endswith("<|im_start|>assistant\nthe answer")
