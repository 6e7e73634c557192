"""Streaming text: the pieces, joined, are the tokenizer's own decoding, whatever its decoder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixkv.service.engine.detokenize import Detokenizer, TokenText
from radixkv.service.engine.token_text import Joining
from tests.tiny_models import build_tokenizer

WORDS = [
    "▁Hello", "▁", "▁▁", "lo", "▁the", "a▁b", "é", "▁日本", "語", "😀", "👩", "\u200d", "e",
    "\u0301",
    "▁ ", "�", "\n", "##ing", "##s", "n't", ".", "!", "<0xg1>", "<0x+4>", "", "<0xE2>x",
]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece_like(decoder: Any) -> Any:
    """A tokenizer of words and bytes that joins them with ``decoder``."""
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *WORDS, *BYTES])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False
    )
    return made


def byte_level() -> Any:
    made = build_tokenizer()
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made.add_tokens([AddedToken("né ça", special=False, normalized=False)])
    return made


PIECEWISE = {
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "two spaces stripped": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "gguf": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    ),
    "gguf stripped": decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "t5": decoders.Metaspace(),
    "metaspace, never prepended": decoders.Metaspace(prepend_scheme="never"),
    "no decoder": None,
}
WINDOWED = {
    "wordpiece": decoders.WordPiece(cleanup=False),
    "strip each token": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]),
    "replace after fusing": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", "--")]),
}
TEXTS = {name: TokenText(sentencepiece_like(d)) for name, d in (PIECEWISE | WINDOWED).items()}
TEXTS["byte level"] = TokenText(byte_level())

ids = st.lists(
    st.one_of(
        st.integers(0, 400),
        # bytes of characters of 1 to 4 bytes, of rubbish, and specials in between
        st.sampled_from([2 + len(WORDS) + b for b in "é日😀a".encode()]),
        st.sampled_from([3 + i for i in range(256)]),
        st.sampled_from([0, 1]),
    ),
    max_size=40,
)


def stream(text: TokenText, token_ids: list[int]) -> tuple[list[str], list[int]]:
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push(i) for i in token_ids]
    pieces.append(detokenizer.flush())
    return pieces, detokenizer.settled()


@pytest.mark.parametrize("name", ["byte level", *PIECEWISE])
@settings(max_examples=150, deadline=None)
@given(token_ids=ids)
def test_pieces_join_to_the_whole_decoding(name: str, token_ids: list[int]) -> None:
    """STREAM-3."""
    pieces, ends = stream(TEXTS[name], token_ids)
    whole = "".join(pieces)
    assert whole == TEXTS[name].decode(token_ids)
    assert len(ends) == len(token_ids)
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(whole)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        alphabet=st.one_of(
            st.characters(exclude_categories=["Cs"]),
            st.sampled_from("👩\u200d💻🏽e\u0301日本語\u0e33نصfi🇩🇪\ufeff�"),
        ),
        max_size=40,
    )
)
def test_any_text_streams_back_whole_and_no_broken_character_is_ever_shown(text: str) -> None:
    """STREAM-3: emoji, joined emoji, combining marks, CJK, flags."""
    token_text = TEXTS["byte level"]
    token_ids = [3 + _BYTE_ORDER[b] for b in text.encode()]
    pieces, _ = stream(token_text, token_ids)
    assert "".join(pieces) == text
    assert all(piece == "" or piece in text for piece in pieces)


def _byte_ids() -> dict[int, int]:
    """Where the tiny tokenizer has each byte: its alphabet is sorted by its printable stand-ins."""
    return {
        raw[0]: i - 3
        for i in range(3, 3 + 256)
        if len(raw := TEXTS["byte level"].token_bytes(i)) == 1
    }


_BYTE_ORDER = _byte_ids()


@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 40), max_size=30))
def test_an_unusual_decoder_streams_through_the_tokenizer_itself(
    name: str, token_ids: list[int]
) -> None:
    text = TEXTS[name]
    assert text.tables.recipe.joining is Joining.WINDOW
    # words that show something: what shows nothing leaves a window no context to begin with
    token_ids = [i for i in token_ids if i < 2 or (text.decode([i]).strip("-▁ �") and i < 28)]
    pieces, ends = stream(text, token_ids)
    assert "".join(pieces) == text.decode(token_ids)
    assert len(ends) == len(token_ids)


def test_a_character_split_over_tokens_comes_whole_and_its_tokens_settle_together() -> None:
    detokenizer = Detokenizer(TEXTS["byte level"])
    a, b, c, d = (3 + _BYTE_ORDER[byte] for byte in "😀".encode())
    letter = 3 + _BYTE_ORDER[ord("x")]
    assert [detokenizer.push(i) for i in (letter, a, b, c)] == ["x", "", "", ""]
    assert detokenizer.settled() == [1]
    assert detokenizer.push(d) == "😀"
    assert detokenizer.settled() == [2, 2, 2, 2]


def test_an_incomplete_character_becomes_a_replacement_mark_only_at_the_end() -> None:
    detokenizer = Detokenizer(TEXTS["byte level"])
    assert [detokenizer.push(3 + _BYTE_ORDER[b]) for b in "日".encode()[:2]] == ["", ""]
    assert detokenizer.settled() == []
    assert detokenizer.flush() == "�"
    assert detokenizer.settled() == [1, 1]
    assert detokenizer.flush() == ""


def test_bytes_of_a_fallback_wait_for_the_end_of_their_run() -> None:
    """A run that turns out to be no UTF-8 is rubbish as a whole, even a part that looked right."""
    text = TEXTS["llama"]
    byte = {b: 2 + len(WORDS) + b for b in range(256)}
    letter = 2 + WORDS.index("lo")
    good, bad = Detokenizer(text), Detokenizer(text)
    assert [good.push(byte[b]) for b in "é\n".encode()] == ["", "", ""]
    assert good.push(letter) == "é\nlo"
    assert good.settled() == [1, 1, 2, 4]
    assert [bad.push(byte[b]) for b in (0xC3, 0xA9, 0xC3)] == ["", "", ""]
    assert bad.push(letter) == "���lo"
    assert bad.settled() == [1, 2, 3, 5]


def test_special_tokens_are_skipped_and_added_ones_are_text() -> None:
    for name in ("byte level", "llama"):
        text = TEXTS[name]
        think = text.tables.names.index("<think>")
        assert text.is_special(0) and not text.is_special(think)
        pieces, ends = stream(text, [0, think, 1])
        assert "".join(pieces) == "<think>"
        assert ends == [0, 7, 7]


def test_special_tokens_that_are_to_be_shown_are_text() -> None:
    """Such as the marker behind which a model writes its calls of functions."""
    text = TokenText(byte_level(), {"<|im_start|>"})
    pieces, _ = stream(text, [0, 1, 2])
    assert "".join(pieces) == "<|im_start|>"
    assert text.is_special(0) and not text.is_special(1)


def test_tokens_are_named_by_their_bytes() -> None:
    plain, pieces = TEXTS["byte level"], TEXTS["llama"]
    assert plain.token_text(2) == "<|im_end|>"
    assert plain.token_bytes(3 + _BYTE_ORDER[0xE6]) == b"\xe6"
    assert plain.token_text(3 + _BYTE_ORDER[0xE6]) == "�"
    assert pieces.token_text(2 + WORDS.index("▁Hello")) == " Hello"
    assert pieces.token_bytes(2 + len(WORDS) + 0xE6) == b"\xe6"
    for token_id in (-1, 10**6):
        assert plain.token_bytes(token_id) == b"" and not plain.is_special(token_id)


def test_a_space_that_is_dropped_at_the_start_is_not_in_the_first_tokens_bytes() -> None:
    hello = 2 + WORDS.index("▁Hello")
    for name, first in (("llama", b"Hello"), ("t5", b"Hello"), ("gemma", b" Hello")):
        detokenizer = Detokenizer(TEXTS[name])
        assert detokenizer.next_bytes(hello) == first
        assert detokenizer.push(hello).encode() == first
        assert detokenizer.next_bytes(hello) == b" Hello"


@settings(max_examples=80, deadline=None)
@given(token_ids=ids)
@pytest.mark.parametrize("name", ["byte level", "llama", "gemma", "t5", "no decoder"])
def test_bytes_as_they_come_next_join_to_the_text(name: str, token_ids: list[int]) -> None:
    text = TEXTS[name]
    detokenizer, raw = Detokenizer(text), b""
    for i in token_ids:
        if not text.is_special(i):
            raw += detokenizer.next_bytes(i)
        detokenizer.push(i)
    whole = text.decode(token_ids)
    if "�" not in whole:  # rubbish is shown differently by a byte fallback
        assert raw.decode() == whole


def test_the_embedded_models_vocabulary_streams_exactly(smollm2_path: Path) -> None:
    """STREAM-3: 300 random answers, and 50 texts with emoji."""
    text = TokenText(AutoTokenizer.from_pretrained(smollm2_path))
    made = random.Random(0)
    size = len(text.tables.known)
    for _ in range(300):
        token_ids = [made.randrange(17, made.choice((300, size))) for _ in range(30)]
        assert "".join(stream(text, token_ids)[0]) == text.decode(token_ids)
    for i in range(50):
        said = f"{chr(0x1F600 + i)} naïve 日本語 {chr(0x915 + i)}\u093f 👩\u200d🚀 {i}\n"
        token_ids = text._tokenizer.encode(said)
        pieces, _ = stream(text, token_ids)
        assert "".join(pieces) == said and "�" not in said


class Slow:
    """A tokenizer without a backend: all there is to call is what transformers' slow ones have."""

    all_special_tokens = ("<s>",)
    _words = ("<s>", "▁Hi", "▁there", "!")

    def __len__(self) -> int:
        return len(self._words)

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [self._words[i] for i in token_ids]

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(self._words[i] for i in token_ids if i).replace("▁", " ").lstrip()


def test_a_slow_tokenizer_streams_too() -> None:
    text = TokenText(Slow())
    assert stream(text, [0, 1, 2, 0, 3])[0] == ["", "Hi", " there", "", "!", ""]
    assert text.token_text(2) == " there" and text.is_special(0)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: a window decodes a bounded number of tokens at each step."""
    text = TEXTS["wordpiece"]
    lengths: list[int] = []
    decode = text.decode

    class Counting(TokenText):
        def decode(self, token_ids: Any) -> str:
            lengths.append(len(token_ids))
            return decode(token_ids)

    stream(Counting(text._tokenizer), [3 + i % 20 for i in range(500)])
    assert max(lengths) < 40
