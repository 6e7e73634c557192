"""Pieces of a prompt, and how they join: which tokens go on from others, and what they add.

Knows tokenizers and stretches of text; nothing of messages, or of who said what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixkv.service.engine.prompting import Prompting

_MOST_TRIMMED = 8  # tokens at the end of an answer that may be nothing but space


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the prompt: what the template wrote, or what the model generated."""

    ids: tuple[int, ...]
    text: str
    """Without the names of special tokens, if it was generated."""
    in_place: str | None = None
    """If it was generated, what it adds to the text before it; None if the template wrote it."""

    @property
    def generated(self) -> bool:
        """Whether the model said it."""
        return self.in_place is not None

    def found_in(self, text: str, at: int) -> int | None:
        """Return how many characters of ``text`` from ``at`` on are this; None if they are not."""
        if self.in_place is not None and text.startswith(self.in_place, at):
            return len(self.in_place)
        return len(self.text) if text.startswith(self.text, at) else None


class Joiner:
    """Tokenizes what goes on from other tokens, and says what tokens add to others."""

    def __init__(self, prompting: Prompting, tokenizer: Any) -> None:
        self._tokenize: Callable[[str], list[int]] = partial(
            prompting.tokenize, add_special_tokens=False
        )
        self._tokenizer = tokenizer
        # Some tokenizers begin every text with a space of their own, which text that goes on must
        # not get. They do not behind a special token.
        self._anchor = ""
        eos = tokenizer.eos_token
        if eos:
            behind = self._tokenize(f"{eos}a")
            if behind[:1] == [tokenizer.eos_token_id] and behind[1:] != self._tokenize("a"):
                self._anchor = eos

    def tokenize(self, text: str, *, first: bool) -> tuple[int, ...]:
        """Return the ids of ``text``, which begins a prompt or goes on from something."""
        if first or not self._anchor or not text:
            return tuple(self._tokenize(text))
        return tuple(self._tokenize(self._anchor + text)[1:])

    def said(self, ids: Sequence[int]) -> str:
        """Return the text of ids by themselves, without the names of special tokens."""
        return self._decode(ids, skip=True)

    def generated(self, pieces: Sequence[Piece], ids: Sequence[int]) -> Piece:
        """Return the piece that ``ids`` are behind ``pieces``."""
        before = next(piece.ids[-1] for piece in reversed(pieces) if piece.ids)
        said = self.said(ids)
        alone, both = self._decode([before], skip=False), self._decode([before, *ids], skip=False)
        in_place = both[len(alone) :] if both.startswith(alone) else said
        return Piece(tuple(ids), said, in_place)

    def trimmed(self, piece: Piece, text: str, at: int) -> Piece | None:
        """Return the beginning of ``piece``, but for spaces, that ``text`` has from ``at`` on."""
        assert piece.in_place is not None
        lead = piece.in_place.removesuffix(piece.text) if piece.text else ""
        for before in dict.fromkeys((lead, "")):
            bare = (before + piece.text).rstrip()
            if len(bare) <= len(before) or not text.startswith(bare, at):
                continue
            for cut in range(1, min(_MOST_TRIMMED, len(piece.ids) - 1) + 1):
                ids = piece.ids[:-cut]
                begin = before + self.said(ids)
                if bare.startswith(begin):
                    return Piece(ids, begin, begin)
        return None

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        )
