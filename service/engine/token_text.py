"""Say what each token of a vocabulary contributes to a text; knows tokenizers, nothing of streams.

A tokenizer's decoder is read once and sorted into one of three ways to join tokens:

    BYTES    byte-level BPE: a token is bytes, the text is their UTF-8 (GPT-2, Llama 3, Qwen)
    PIECES   a token is text or, with byte fallback, one byte (Llama 2, Mistral, Gemma, T5)
    WINDOW   anything else: only the tokenizer itself can say, a few tokens at a time
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Joining(Enum):
    """How the tokens of a vocabulary make a text."""

    BYTES = "bytes"
    PIECES = "pieces"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the decoder does with tokens, in the order of the fields."""

    joining: Joining
    replace: tuple[tuple[str, str], ...] = ()
    """In each token."""
    drop_in_first: str = ""
    """A character that the first token loses instead."""
    separator: str = ""
    """Before each token but the first."""
    byte_fallback: bool = False
    replace_after: tuple[tuple[str, str], ...] = ()
    """One character for another, in the text."""
    strip: str = ""
    """A character stripped off the start of the text, at most ``strip_count`` times."""
    strip_count: int = 0


def read_recipe(decoder: dict[str, Any] | None) -> Recipe:
    """Return what ``decoder`` (as in tokenizer.json) does; WINDOW where it does something else."""
    window = Recipe(Joining.WINDOW)
    if decoder is None:
        return Recipe(Joining.PIECES, separator=" ")
    steps = list(_flat(decoder))
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return Recipe(Joining.BYTES)
    if [kind for kind in kinds if kind != "Fuse"] == ["Metaspace"]:
        mark = steps[kinds.index("Metaspace")]
        first = "" if mark.get("prepend_scheme") == "never" else mark["replacement"]
        return Recipe(Joining.PIECES, ((mark["replacement"], " "),), drop_in_first=first)
    replace: list[tuple[str, str]] = []
    after: list[tuple[str, str]] = []
    strip, strip_count = "", 0
    fused = fallback = False
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback"} if not fused and not fallback:
                fallback = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if not fused and not fallback:
                    replace.append((old, new))
                elif len(old) == len(new) == 1 and not strip:
                    after.append((old, new))
                else:
                    return window
            case {"type": "Strip", "content": str(strip), "start": int(strip_count), "stop": 0}:
                if not fused or kinds.count("Strip") > 1:
                    return window
            case _:
                return window
    return Recipe(
        Joining.PIECES,
        tuple(replace),
        byte_fallback=fallback,
        replace_after=tuple(after),
        strip=strip,
        strip_count=strip_count,
    )


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [flat for step in decoder["decoders"] for flat in _flat(step)]


@dataclass(frozen=True, slots=True)
class Tables:
    """The whole vocabulary; lists are indexed by token id."""

    recipe: Recipe
    names: list[str | None]
    """As the tokenizer's own vocabulary has them."""
    special: frozenset[int]
    shown: list[bytes]
    """What a token stands for when it is named: the literal name of a special token, too."""
    said: list[bytes]
    """What a token adds to a text that has begun; nothing for special tokens."""
    plain: list[str | None]
    """The same as text; None where it is not whole characters, or is a byte of a fallback."""
    known: list[bool]
    """Whether decoding does not skip the token."""


class TokenText:
    """A tokenizer's tokens as bytes and text.

    The tables are built at first use (``prepare()`` does it early), and are never written again,
    so any thread may read them.
    """

    def __init__(self, tokenizer: Any, said: Collection[str] = ()) -> None:
        """``tokenizer`` is one of transformers', fast or slow. ``said``: special tokens that are
        text all the same, where the decoder is a usual one (not WINDOW)."""
        self._tokenizer = tokenizer
        self._said = frozenset(said)

    def prepare(self) -> None:
        """Build the tables now: O(vocabulary), some tenths of a second."""
        _ = self.tables

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; empty for an id that the tokenizer does not have."""
        shown = self.tables.shown
        return shown[token_id] if 0 <= token_id < len(shown) else b""

    def token_text(self, token_id: int) -> str:
        """Return the token as text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out as a special one."""
        return token_id in self.tables.special

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ``token_ids`` as the tokenizer itself has it."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def tables(self) -> Tables:
        """The vocabulary's tables."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "get_vocab"):
            return self._slow_tables()
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        names: list[str | None] = [None] * (max([*vocab.values(), *added, -1]) + 1)
        for name, token_id in vocab.items():
            names[token_id] = name
        for token_id, token in added.items():
            names[token_id] = token.content
        special = {token.content for token in added.values() if token.special}
        decoder = backend.decoder
        recipe = read_recipe(None if decoder is None else json.loads(decoder.__getstate__()))
        if recipe.joining is not Joining.WINDOW:  # else the tokenizer says, and it skips them
            special -= self._said
        return _build(names, special, recipe)

    def _slow_tables(self) -> Tables:
        names: list[str | None] = list(
            self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))
        )
        special = set(self._tokenizer.all_special_tokens)
        return _build(names, special, Recipe(Joining.WINDOW))


def _build(names: list[str | None], special: set[str], recipe: Recipe) -> Tables:
    known = [name is not None and name not in special for name in names]
    to_bytes: Callable[[str], bytes]
    if recipe.joining is Joining.BYTES:
        to_bytes = _byte_level()
    elif recipe.joining is Joining.PIECES:
        to_bytes = _piece(recipe)
    else:
        to_bytes = _guess
    said = [to_bytes(name or "") if ok else b"" for name, ok in zip(names, known, strict=True)]
    shown = [
        word if ok else (name or "").encode()
        for name, word, ok in zip(names, said, known, strict=True)
    ]
    plain: list[str | None] = [
        None if recipe.byte_fallback and ok and _fallback_byte(recipe, name or "") else _whole(word)
        for name, word, ok in zip(names, said, known, strict=True)
    ]
    return Tables(
        recipe=recipe,
        names=names,
        special=frozenset(i for i, name in enumerate(names) if name in special),
        shown=shown,
        said=said,
        plain=plain,
        known=known,
    )


def _whole(word: bytes) -> str | None:
    try:
        return word.decode()
    except UnicodeDecodeError:
        return None


def _byte_level() -> Callable[[str], bytes]:
    """Return GPT-2's mapping of printable characters to bytes; a token with others is literal."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    byte_of = {ord(chr(b)): b for b in printable} | {256 + i: b for i, b in enumerate(others)}
    swap = {char: chr(byte) for char, byte in byte_of.items()}
    mapped = frozenset(map(chr, byte_of))

    def to_bytes(name: str) -> bytes:
        if mapped.issuperset(name):
            return name.translate(swap).encode("latin-1")
        return name.encode()

    return to_bytes


def _piece(recipe: Recipe) -> Callable[[str], bytes]:
    def to_bytes(name: str) -> bytes:
        byte = _fallback_byte(recipe, name)
        return byte or (recipe.separator + replaced(name, recipe.replace)).encode()

    return to_bytes


def replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return ``text`` with each old replaced by its new, one pair after the other."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _fallback_byte(recipe: Recipe, name: str) -> bytes | None:
    found = _BYTE_TOKEN.fullmatch(replaced(name, recipe.replace)) if recipe.byte_fallback else None
    return bytes([int(found[1], 16)]) if found else None


def _guess(name: str) -> bytes:
    return name.replace("▁", " ").encode()
