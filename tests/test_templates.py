"""A template of the operator's own: what writes chats, and a part of the cache's identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import InvalidConfig
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.templates import MAX_TEMPLATE_BYTES, read_template, with_template

SHIPPED = Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja"
CHAT = [{"role": "user", "content": "hello you and the user"}]


def test_a_template_file_writes_the_chats_and_the_model_keeps_its_own(
    tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}é")
    with Engine(tiny_llama, chat_template=str(file), kv_memory="4MiB") as engine:
        ids = engine.render(CHAT)
        assert engine.detokenize(ids) == "[user] hello you and the user\u00e9"
        assert engine.chat(CHAT, max_tokens=2, temperature=0).usage.prompt_tokens == len(ids)
    with Engine(tiny_llama, kv_memory="4MiB") as engine:
        assert engine.detokenize(engine.render(CHAT)).startswith("<|im_start|>user\n")


def test_another_template_is_another_identity_even_for_equal_tokens(
    tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    own = tiny_llama.tokenizer.chat_template
    file.write_text("{# as it was #}" + own)
    with (
        Engine(tiny_llama, kv_memory="4MiB") as first,
        Engine(tiny_llama, chat_template=str(file), kv_memory="4MiB") as second,
    ):
        assert first.render(CHAT) == second.render(CHAT)
        told = first.cache.explain(first.render(CHAT)).identity
        other = second.cache.explain(second.render(CHAT)).identity
    assert told.difference(other) == ("template",)


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "no such file"),
        (b"\xff\xfe", "cannot be read"),
        (b"  \n", "empty"),
        (b"x" * (MAX_TEMPLATE_BYTES + 1), "larger"),
        (b"{% for %}", "no Jinja"),
        (b"{{ messages", "no Jinja"),
    ],
)
def test_a_file_that_is_no_template_is_refused_by_its_name(
    tiny_llama: LoadedModel, tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=why) as caught:
        Engine(tiny_llama, chat_template=str(file), kv_memory="4MiB")
    assert str(file) in str(caught.value)


def test_a_template_that_wants_another_chat_is_taken(tiny_llama: LoadedModel) -> None:
    """Such as one that insists on a system prompt: it is asked again with each chat."""
    picky = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}ok"
    assert with_template(tiny_llama, picky, "t").tokenizer.chat_template == picky


def test_a_home_directory_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text("x")
    assert read_template("~/t.jinja") == "x"


def test_an_unknown_parser_is_refused_and_a_known_one_is_used(tiny_llama: LoadedModel) -> None:
    with pytest.raises(InvalidConfig, match="auto, hermes, llama3_json, mistral"):
        Engine(tiny_llama, tool_call_parser="gpt", kv_memory="4MiB")
    with Engine(tiny_llama, tool_call_parser="mistral", kv_memory="4MiB") as engine:
        found = engine.prompting.tool_format
    assert found is not None and found.name == "mistral"
    with Engine(tiny_llama, chat_template=str(SHIPPED), kv_memory="4MiB") as engine:
        found = engine.prompting.tool_format
    assert found is not None and found.name == "hermes"


def test_an_embedded_engine_shows_tools_and_tells_calls_from_words(
    tiny_llama: LoadedModel,
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with Engine(tiny_llama, chat_template=str(SHIPPED), kv_memory="8MiB") as engine:
        done = engine.chat(CHAT, tools=[tool], max_tokens=2, temperature=0)
        assert '"name": "add"' in engine.detokenize(done.prompt_token_ids)
        again = engine.stream_chat(CHAT, tools=[tool], max_tokens=1, temperature=0).result()
        assert again.usage.cached_tokens == done.usage.prompt_tokens - 1
        assert engine.prompting.read_answer(done.text, [tool]).text == done.text
