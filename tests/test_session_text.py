"""What a session's history is made of: ids that stay as generated, and text as the template has it.

Real templates and tokenizers in small; no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.errors import InvalidRequest
from radixkv.service.engine.prompting import Prompting
from radixkv.service.session_text import ChatWriter, PlainWriter, Transcript, Writer
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer

# Qwen3's way: what was thought is left out of all but the newest answer.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# DeepSeek-R1's way: the first word of an answer is put into the model's mouth, and then forgotten.
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TRIMMED = CHAT_TEMPLATE.replace("message['content']", "(message['content'] | trim)")
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)


def spaced_tokenizer() -> Any:
    """A tokenizer that begins every text with a space of its own, as those of Llama 2 do."""
    words = ["<unk>", "</s>", "[INST]", "[/INST]", *"▁abcdefghijklmnopqrstuvwxyz", "▁hello", "▁you"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = []
    for word in ("▁hello", "▁you"):
        for size in range(2, len(word) + 1):
            vocab.setdefault(word[:size], len(vocab))
            merges.append((word[: size - 1], word[size - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["[INST]", "[/INST]"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    return tokenizer


def writer(template: str, tokenizer: Any = None, **kwargs: Any) -> tuple[ChatWriter, Any]:
    tokenizer = tokenizer or build_tokenizer()
    tokenizer.chat_template = template
    prompting = Prompting(tokenizer, len(tokenizer))
    return ChatWriter(
        prompting,
        tokenizer,
        tools=kwargs.get("tools"),
        template_kwargs=kwargs.get("template_kwargs"),
    ), tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def letters(tokenizer: Any, text: str) -> list[int]:
    """``text`` in tokens of one letter: no tokenizer would do it so, but a model may."""
    return [encode(tokenizer, letter)[0] for letter in text]


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_generated_ids_stay_though_their_text_has_others() -> None:
    """TOKENIZE: a history that is tokenized anew loses its prefix where the two differ."""
    write, tokenizer = writer(CHAT_TEMPLATE)
    prompt = write.ask(Transcript(), "hello")
    assert list(prompt.ids) == encode(
        tokenizer, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    odd = letters(tokenizer, "hello the user")
    assert odd != encode(tokenizer, "hello the user")
    answered = write.answer(prompt, "hello the user", odd)
    again = write.ask(answered, "and you")
    assert again.ids[: len(answered.ids)] == answered.ids == (*prompt.ids, *odd)
    rest = "<|im_end|>\n<|im_start|>user\nand you<|im_end|>\n<|im_start|>assistant\n"
    assert list(again.ids[len(answered.ids) :]) == encode(tokenizer, rest)
    assert [m["content"] for m in again.messages] == ["hello", "hello the user", "and you"]
    assert all(a is b for a, b in zip(again.pieces, answered.pieces, strict=False)), "shared"


def test_what_was_thought_goes_where_the_template_leaves_it_out_and_the_rest_is_a_hit() -> None:
    write, tokenizer = writer(THINKING)
    prompt = write.ask(Transcript(), "hello")
    said = "<think>\nhm\n</think>\n\nhello you"
    first = write.answer(prompt, said, letters(tokenizer, said))
    second = write.ask(first, "and")
    whole = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello you<|im_end|>\n"
        "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(second.ids) == encode(tokenizer, whole), "as if the chat had been rendered at once"
    assert shared(second.ids, first.ids) == len(prompt.ids)
    answered = write.answer(second, "to you", letters(tokenizer, "to you"))
    third = write.ask(answered, "so")
    assert third.ids[: len(answered.ids)] == answered.ids, "an answer without thoughts stays"
    assert [m["content"] for m in third.messages][1] == said, "the chat remembers all of it"


def test_marks_put_into_the_models_mouth_are_no_part_of_the_next_prompt() -> None:
    write, tokenizer = writer(OPENED)
    prompt = write.ask(Transcript(), "hello")
    assert tokenizer.decode(prompt.ids).endswith("assistant\n<think>\n")
    first = write.answer(prompt, "hm</think>\n\nyou", letters(tokenizer, "hm</think>\n\nyou"))
    second = write.ask(first, "and")
    assert tokenizer.decode(second.ids) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyou<|im_end|>\n"
        "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert list(second.ids) == encode(tokenizer, tokenizer.decode(second.ids))
    assert shared(second.ids, prompt.ids) >= len(prompt.ids) - len(letters(tokenizer, "<think>\n"))


@pytest.mark.parametrize("spaces", ["\n", " \n\n", "  "])
def test_spaces_at_the_end_go_and_the_ids_before_them_stay(spaces: str) -> None:
    write, tokenizer = writer(TRIMMED)
    prompt = write.ask(Transcript(), "hello")
    odd = letters(tokenizer, "hello the")
    first = write.answer(prompt, "hello the" + spaces, [*odd, *letters(tokenizer, spaces)])
    second = write.ask(first, "and")
    assert second.ids[: len(prompt.ids) + len(odd)] == (*prompt.ids, *odd)
    assert tokenizer.decode(second.ids).endswith(
        "hello the<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"
    )
    third = write.ask(write.answer(second, "a", letters(tokenizer, "a")), "so")
    assert third.ids[: len(second.ids)] == second.ids


@pytest.mark.parametrize("said", ["\nhello", "   ", "", "\n"])
def test_an_answer_that_the_template_changes_at_its_head_is_what_the_template_says(
    said: str,
) -> None:
    write, tokenizer = writer(TRIMMED)
    prompt = write.ask(Transcript(), "hello")
    second = write.ask(write.answer(prompt, said, letters(tokenizer, said)), "and")
    assert list(second.ids) == encode(
        tokenizer,
        f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{said.strip()}<|im_end|>\n"
        "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n",
    )


def test_the_head_of_a_token_that_a_stop_string_cut_is_in_the_history() -> None:
    write, tokenizer = writer(CHAT_TEMPLATE)
    prompt = write.ask(Transcript(), "hello")
    ids = letters(tokenizer, "to")
    second = write.ask(write.answer(prompt, "to th", ids), "and")  # of " the", say
    assert second.ids[: len(prompt.ids) + 2] == (*prompt.ids, *ids)
    assert "assistant\nto th<|im_end|>" in tokenizer.decode(second.ids)


def test_special_tokens_inside_an_answer_stay_where_they_are() -> None:
    """With ``ignore_eos`` a model may go on behind its end; the text does not show that."""
    write, tokenizer = writer(CHAT_TEMPLATE)
    prompt = write.ask(Transcript(), "hello")
    ids = [*letters(tokenizer, "to"), tokenizer.eos_token_id, *letters(tokenizer, "you")]
    answered = write.answer(prompt, "toyou", ids)
    assert write.ask(answered, "and").ids[: len(answered.ids)] == answered.ids


def test_half_a_character_at_the_end_keeps_its_ids() -> None:
    write, tokenizer = writer(CHAT_TEMPLATE)
    prompt = write.ask(Transcript(), "hello")
    ids = encode(tokenizer, "a€")[:-1]
    answered = write.answer(prompt, "a\ufffd", ids)
    assert write.ask(answered, "and").ids[: len(answered.ids)] == answered.ids


def test_a_tokenizer_that_adds_a_space_to_every_text_adds_none_inside_a_history() -> None:
    tokenizer = spaced_tokenizer()
    write, _ = writer(tokenizer.chat_template, tokenizer)
    prompt = write.ask(Transcript(), "hello")
    said = encode(tokenizer, "hello")  # which is "▁hello": a space that decoding leaves out
    answered = write.answer(prompt, "hello", said)
    second = write.ask(answered, "you")
    assert second.ids[: len(answered.ids)] == answered.ids
    assert list(second.ids) == encode(tokenizer, "[INST] hello[/INST] hello</s>[INST] you[/INST]")
    plain = PlainWriter(Prompting(tokenizer, len(tokenizer)), tokenizer)
    begun = plain.answer(plain.ask(Transcript(), "hello"), "a", letters(tokenizer, "a")[-1:])
    assert tokenizer.decode(plain.ask(begun, "you").ids).endswith("you")
    assert " you" not in tokenizer.decode(plain.ask(begun, "you").ids)


def test_tools_and_settings_of_the_template_are_rendered_each_time_and_copied() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    write, tokenizer = writer(TOOLS, tools=tools)
    tools.append({"type": "function", "function": {"name": "other"}})
    prompt = write.ask(Transcript(), "hello")
    assert tokenizer.decode(prompt.ids).startswith("<|im_start|>tools\n[{")
    assert "other" not in tokenizer.decode(prompt.ids)
    called = write.answer(prompt, '{"name": "look"}', letters(tokenizer, '{"name": "look"}'))
    result: dict[str, Any] = {"role": "tool", "content": "a cat"}
    second = write.ask(called, [result])
    result["content"] = "a dog"
    assert second.ids[: len(called.ids)] == called.ids
    assert "<|im_start|>tool\na cat" in tokenizer.decode(second.ids)
    assert second.messages[-1]["content"] == "a cat"
    beginning = write.ids(Transcript())
    assert beginning == prompt.ids[: len(beginning)] and "look" in tokenizer.decode(beginning)


def test_before_the_first_turn_there_is_what_every_chat_begins_with() -> None:
    write, tokenizer = writer(CHAT_TEMPLATE)
    system = Transcript(({"role": "system", "content": "be nice"},))
    assert tokenizer.decode(write.ids(system)) == "<|im_start|>system\nbe nice<|im_end|>\n"
    assert write.ask(system, "hello").ids[: len(write.ids(system))] == write.ids(system)
    bare, _ = writer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert bare.ids(Transcript()) == ()


def test_plain_text_and_ids_are_appended_as_they_are() -> None:
    tokenizer = build_tokenizer(add_bos=True)
    write = PlainWriter(Prompting(tokenizer, len(tokenizer)), tokenizer)
    first = write.ask(Transcript(), "hello")
    assert list(first.ids) == tokenizer.encode("hello"), "with the BOS, once"
    answered = write.answer(first, "to th", letters(tokenizer, "to"))
    assert list(answered.ids) == [
        *first.ids, *letters(tokenizer, "to"), *encode(tokenizer, " th")
    ]  # fmt: skip
    second = write.ask(answered, [5, 6, 7])
    assert second.ids == (*answered.ids, 5, 6, 7) == write.ids(second)
    assert write.ask(second, "you").ids == (*second.ids, *encode(tokenizer, "you"))
    with pytest.raises(InvalidRequest, match="prompt has token id 99999"):
        write.ask(second, [99999])


@pytest.mark.parametrize("content", [3, None, [], ["hello"], {"content": "no role"}])
def test_what_is_no_message_is_refused(content: Any) -> None:
    write, _ = writer(CHAT_TEMPLATE)
    with pytest.raises(InvalidRequest, match="wanted"):
        write.ask(Transcript(), content)


def test_a_model_without_a_template_is_told_what_to_do() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match=r"session\(template=False\)"):
        ChatWriter(Prompting(tokenizer, 300), tokenizer, tools=None, template_kwargs=None)


def _chat() -> Writer:
    return writer(CHAT_TEMPLATE)[0]


def _plain() -> Writer:
    tokenizer = build_tokenizer()
    return PlainWriter(Prompting(tokenizer, len(tokenizer)), tokenizer)


@pytest.mark.parametrize("make", [_chat, _plain])
def test_what_comes_before_is_never_changed(make: Callable[[], Writer]) -> None:
    """LIBRARY-1: two ways on from one place leave it, and each other, alone."""
    write = make()
    stem = write.answer(write.ask(Transcript(), "hello"), "to", [87, 82])
    ids = stem.ids
    one, two = write.ask(stem, "one"), write.ask(stem, "two")
    write.answer(one, "a", [68])
    assert stem.ids == ids and write.ask(stem, "one").ids == one.ids != two.ids
