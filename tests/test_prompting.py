"""Chats and texts become the same ids whichever way they come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.prompting import Prompting
from tests.tiny_models import build_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
]


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_chat_its_rendered_text_and_its_ids_are_the_same_prompt(add_bos: bool) -> None:
    """TEMPLATE-4: one BOS, whichever way the prompt comes in."""
    tokenizer = build_tokenizer(add_bos=add_bos)
    prompting = Prompting(tokenizer, len(tokenizer))
    as_chat = prompting.render(CHAT)
    as_text = prompting.tokenize(prompting.render_text(CHAT))
    assert as_chat == as_text
    assert as_chat.count(0) == (1 if add_bos else 0)


def test_plain_text_gets_its_bos() -> None:
    tokenizer = build_tokenizer(add_bos=True)
    prompting = Prompting(tokenizer, len(tokenizer))
    assert prompting.tokenize("hello")[0] == 0
    assert prompting.tokenize("hello", add_special_tokens=False)[0] != 0


def test_no_messages_and_no_template_are_refused_by_name() -> None:
    tokenizer = build_tokenizer()
    prompting = Prompting(tokenizer, len(tokenizer))
    with pytest.raises(InvalidRequest, match="messages is empty"):
        prompting.render([])
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        prompting.render(CHAT)


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Prompting(tokenizer, len(tokenizer)).render(CHAT)


def test_the_last_message_can_be_continued() -> None:
    tokenizer = build_tokenizer()
    prompting = Prompting(tokenizer, len(tokenizer))
    text = prompting.render_text(
        [*CHAT, {"role": "assistant", "content": "I think"}], continue_final_message=True
    )
    assert text.endswith("I think")


@pytest.mark.parametrize("ids", [[], [-1], [5, 10**6]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    tokenizer = build_tokenizer()
    with pytest.raises(InvalidRequest) as caught:
        Prompting(tokenizer, len(tokenizer)).check_ids(ids, "prompt")
    assert caught.value.param == "prompt"


SHIPPED = Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING: list[dict[str, Any]] = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


def prompting_of(template: object) -> Prompting:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return Prompting(tokenizer, len(tokenizer))


def test_the_shipped_template_shows_tools_calls_and_results() -> None:
    text = prompting_of(SHIPPED.read_text()).render_text([*CALLING, RESULT], tools=[TOOL])
    assert json.dumps(TOOL) in text
    assert text.index(json.dumps(TOOL)) < text.index("be brief")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_the_shipped_template_goes_on_from_what_it_wrote_turn_by_turn() -> None:
    """Each turn's prompt begins with the last one's, so nothing of an agent's loop is lost."""
    prompting = prompting_of(SHIPPED.read_text())
    chat = [*CALLING, RESULT, {"role": "assistant", "content": "Two."}, CHAT[1]]
    texts = [
        prompting.render_text(chat[:n], tools=[TOOL], add_generation_prompt=False)
        for n in range(2, len(chat) + 1)
    ]
    for shorter, longer in zip(texts, texts[1:], strict=False):
        assert longer.startswith(shorter)


def test_tools_and_calls_that_a_template_would_leave_out_are_refused() -> None:
    prompting = prompting_of(build_tokenizer().chat_template)
    cases: Any = ((CHAT, [TOOL], "tools"), (CALLING, None, "messages"))
    for messages, tools, param in cases:
        with pytest.raises(InvalidRequest, match="--chat-template") as caught:
            prompting.render_text(messages, tools=tools)
        assert caught.value.param == param
    assert prompting.render_text(CHAT, tools=[]) == prompting.render_text(CHAT)


def test_of_several_named_templates_the_one_for_tools_counts() -> None:
    plain = build_tokenizer().chat_template
    prompting = prompting_of({"default": plain, "tool_use": SHIPPED.read_text()})
    assert json.dumps(TOOL) in prompting.render_text(CHAT, tools=[TOOL])
    assert prompting.tool_format is not None


def test_templates_that_insist_on_short_ids_get_them() -> None:
    """Mistral's."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{% endif %}{{ c.id }}{{ c.function.name }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    text = prompting_of(template).render_text([*CALLING, RESULT])
    assert len(text) == 2 * 9 + len("add") and text[:9] == text[-9:]


@pytest.mark.parametrize("text", ["a\U0001f600b", "\U0001f600\U0001f600", "\u00e9\u65e5x", "abc"])
def test_where_a_character_begins_is_told_of_each_of_its_tokens(text: str) -> None:
    prompting = prompting_of(None)
    starts: list[int] = []
    ids: list[int] = []
    for character in text:
        starts.append(len(ids))
        ids += prompting.tokenize(character, add_special_tokens=False)
    for at in range(len(ids) + 1):
        want = len(ids) if at == len(ids) else max(start for start in starts if start <= at)
        assert prompting.char_start(ids, at) == want


def test_only_special_tokens_have_special_ids() -> None:
    prompting = prompting_of(None)
    assert prompting.special_ids({"<|im_start|>", "hello"}) == {"<|im_start|>": 1}


def test_an_answer_is_told_from_its_calls() -> None:
    prompting = prompting_of(SHIPPED.read_text())
    said = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer = prompting.read_answer(said, [TOOL])
    assert answer.text == "So:" and answer.calls[0].name == "add"
    assert prompting.read_answer(said, []).text == said
    assert prompting_of(None).read_answer(said, [TOOL]).text == said
