"""Turn tokens into text as they come; knows how tokens join, nothing of stops or requests.

The pieces of text returned, joined, equal the tokenizer's decoding of all tokens at once (special
ones skipped, no clean-up of spaces), and no piece is ever taken back: a character whose bytes come
with several tokens is returned when it is complete. Each token costs O(its own length).

Byte fallback (Llama 2, Gemma) decides over a whole run of byte tokens whether it is text or
rubbish, so such a run is returned when it ends. For a decoder that is none of the usual ones
(WINDOW in token_text.py) a few tokens are decoded again at each step; there equality is the rule,
not a proof.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from radixkv.service.engine.token_text import Joining, Tables, TokenText, replaced

__all__ = ["Detokenizer", "TokenText"]

_REPLACEMENT = "�"
_PATIENCE = 32  # tokens that WINDOW waits for a character to become whole


class Detokenizer:
    """The text of one sequence of tokens."""

    __slots__ = ("_joiner",)

    def __init__(self, token_text: TokenText) -> None:
        tables = token_text.tables
        joiner: _Joiner
        if tables.recipe.joining is Joining.BYTES:
            joiner = _Bytes(tables)
        elif tables.recipe.joining is Joining.PIECES:
            joiner = _Pieces(tables)
        else:
            joiner = _Window(token_text)
        self._joiner = joiner

    def push(self, token_id: int) -> str:
        """Take the next token and return the characters that it completes."""
        return self._joiner.push(token_id)

    def flush(self) -> str:
        """Return what is left at the end: an incomplete character as U+FFFD, as decoding has it."""
        return self._joiner.flush()

    def settled(self) -> list[int]:
        """Return, for each token settled since the last call, where its text ends.

        A token is settled when all its bytes are in the text returned so far; the number is the
        length of the text up to and including the last character that it has a part in. Tokens
        settle in order, and numbers never fall.
        """
        ends = self._joiner.ends
        self._joiner.ends = []
        return ends

    def next_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token if it came next.

        Those of ``TokenText.token_bytes``, but for a space that is dropped at the start of a text.
        """
        return self._joiner.next_bytes(token_id)


class _Joiner(Protocol):
    ends: list[int]

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def next_bytes(self, token_id: int) -> bytes: ...


class _Bytes:
    """Byte-level BPE. ``_waiting`` tokens end inside a character, of which bytes are missing."""

    __slots__ = ("_codec", "_length", "_tables", "_waiting", "ends")

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._codec = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._waiting = 0
        self.ends: list[int] = []

    def push(self, token_id: int) -> str:
        tables = self._tables
        known = 0 <= token_id < len(tables.plain)
        plain = tables.plain[token_id] if known else ""
        if plain is not None and not self._waiting:
            self._length += len(plain)
            self.ends.append(self._length)
            return plain
        text = self._codec.decode(tables.said[token_id] if known else b"")
        self._grow(text)
        if self._codec.getstate()[0]:
            self._waiting += 1
        else:
            self.ends.append(self._length)
        return text

    def flush(self) -> str:
        text = self._codec.decode(b"", True)
        self._grow(text)
        return text

    def next_bytes(self, token_id: int) -> bytes:
        shown = self._tables.shown
        return shown[token_id] if 0 <= token_id < len(shown) else b""

    def _grow(self, text: str) -> None:
        if not text:
            return
        # the bytes that were waiting are always one character: the first one, or one U+FFFD
        self.ends += [self._length + 1] * self._waiting
        self._waiting = 0
        self._length += len(text)


class _Pieces:
    """Text tokens, and single-byte tokens in between that are held until their run ends."""

    __slots__ = ("_begun", "_raw", "_run", "_strip_left", "_stripped", "_tables", "ends")

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._run: list[bytes] = []  # empty bytes for a special token in the midst of a run
        self._raw = 0  # characters before stripping
        self._begun = False
        self._strip_left = tables.recipe.strip_count
        self._stripped = 0
        self.ends: list[int] = []

    def push(self, token_id: int) -> str:
        tables = self._tables
        if not (0 <= token_id < len(tables.known) and tables.known[token_id]):
            if self._run:
                self._run.append(b"")
            else:
                self._settle(0)
            return ""
        plain = tables.plain[token_id]
        first, self._begun = not self._begun, True
        if plain is None:
            self._run.append(tables.said[token_id])
            return ""
        if first:
            plain = self._first(token_id, plain)
        text = self._end_run() + self._visible(plain)
        self._settle(len(plain))
        return text

    def flush(self) -> str:
        return self._end_run()

    def next_bytes(self, token_id: int) -> bytes:
        tables = self._tables
        if not 0 <= token_id < len(tables.known):
            return b""
        left = self._left_after_run()
        if not tables.known[token_id] or (self._begun and not left):
            return tables.shown[token_id]
        plain = tables.plain[token_id]
        if plain is None:
            byte = tables.said[token_id]
            return b"" if left and byte == tables.recipe.strip.encode() else byte
        if not self._begun:
            plain = self._first(token_id, plain)
        return plain[self._strippable(plain, left) :].encode()

    def _first(self, token_id: int, plain: str) -> str:
        recipe = self._tables.recipe
        if recipe.drop_in_first:
            return (self._tables.names[token_id] or "").replace(recipe.drop_in_first, "")
        return plain[len(recipe.separator) :]

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, []
        raw = b"".join(run)
        try:
            text, whole = raw.decode(), True
        except UnicodeDecodeError:
            text, whole = _REPLACEMENT * len(raw), False
        text = self._visible(text)
        for byte in run:  # each character ends a token's part in it at the character's first byte
            starts = byte and not (whole and byte[0] & 0xC0 == 0x80)
            self._settle(1 if starts else 0)
        return text

    def _visible(self, raw: str) -> str:
        """Return ``raw`` as it shows in the text: with what is left to strip off it."""
        text = replaced(raw, self._tables.recipe.replace_after)
        if self._strip_left and text:
            dropped = self._strippable(text, self._strip_left)
            self._stripped += dropped
            self._strip_left = self._strip_left - dropped if dropped == len(text) else 0
            text = text[dropped:]
        return text

    def _left_after_run(self) -> int:
        """Return how many characters will be left to strip when the run of bytes has ended."""
        strip, run = self._tables.recipe.strip.encode(), b"".join(self._run)
        return max(0, self._strip_left - len(run)) if not run.strip(strip) else 0

    def _strippable(self, text: str, most: int) -> int:
        head = text[:most]
        return len(head) - len(head.lstrip(self._tables.recipe.strip)) if head else 0

    def _settle(self, num_chars: int) -> None:
        self._raw += num_chars
        self.ends.append(max(0, self._raw - self._stripped))


class _Window:
    """Any tokenizer: decodes the tokens since the last but one whole piece again at each step."""

    __slots__ = ("_done", "_ids", "_known", "_length", "_said", "_token_text", "_waiting", "ends")

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._known = token_text.tables.known
        self._ids: list[int] = []
        self._done = 0  # ids before this place have been said
        self._said = ""  # their text
        self._length = 0
        self._waiting = 0
        self.ends: list[int] = []

    def push(self, token_id: int) -> str:
        self._waiting += 1
        if not (0 <= token_id < len(self._known) and self._known[token_id]):
            return self._say(self._said) if self._waiting == 1 else ""
        self._ids.append(token_id)
        text = self._token_text.decode(self._ids)
        if len(text) <= len(self._said) and self._waiting < _PATIENCE:
            return ""
        if text.endswith(_REPLACEMENT) and self._waiting < _PATIENCE:
            return ""
        return self._say(text)

    def flush(self) -> str:
        return self._say(self._token_text.decode(self._ids)) if self._waiting else ""

    def next_bytes(self, token_id: int) -> bytes:
        return self._token_text.token_bytes(token_id)

    def _say(self, text: str) -> str:
        new = text[len(self._said) :]
        self._length += len(new)
        self.ends += [self._length] * self._waiting
        self._waiting = 0
        if new:  # the tokens of this piece are the next one's context
            del self._ids[: self._done]
            self._done = len(self._ids)
            self._said = self._token_text.decode(self._ids)
        return new
