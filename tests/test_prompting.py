"""Chats and texts become the same ids whichever way they come in."""

from __future__ import annotations

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.prompting import Prompting
from tests.tiny_models import build_tokenizer

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


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
