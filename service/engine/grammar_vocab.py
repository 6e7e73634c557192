"""A model's tokens as llguidance wants them: bytes, ends, and how text is usually cut into them.

The bytes are those that our own detokenizer joins, so what a grammar sees is what the client reads.
Knows tokenizers; nothing of schemas or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

from radixkv.errors import InvalidRequest
from radixkv.service.engine.token_text import Joining, Recipe, TokenText

Bits = np.ndarray
"""Tokens as bits: int32 ``[words]``, token ``t`` is bit ``t % 32`` of word ``t // 32``."""
_MAX_CUT_BYTES = 256


class Vocabulary:
    """The tokens of one model; never changes, so any thread may read it."""

    def __init__(
        self,
        tokenizer: Any,
        token_text: TokenText,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        num_threads: int,
    ) -> None:
        """Build llguidance's tables: O(vocabulary), some tenths of a second that no other Python
        thread runs in. Raises InvalidRequest for a tokenizer whose tokens are no pieces of text.
        """
        tables = token_text.tables
        reason = _reason_against(tables.recipe)
        if reason is not None:
            raise InvalidRequest(f"this model's answers cannot be held to a form: {reason}")
        self.eos = np.array(sorted(t for t in eos_token_ids if t < vocab_size), np.int64)
        words = [word if word else b"" for word in tables.shown[:vocab_size]]
        words += [b""] * (vocab_size - len(words))
        special = [token for token in tables.special if token < vocab_size]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        eos = self.eos.tolist()
        self.tokens = LLTokenizer(_Words(words, special, eos, backend), eos_token=eos or None)
        self.num_words = -(-self.tokens.vocab_size // 32)
        """Of a row of bits; without an end of sequence llguidance adds a token of its own."""
        self.executor = LLExecutor(num_threads)
        drops = tables.recipe.strip or tables.recipe.drop_in_first
        self.not_first: Bits | None = None
        """Tokens that would lose a space at the start of a text."""
        if drops:
            self.not_first = self.bits(i for i, word in enumerate(words) if word[:1] == b" ")

    def bits(self, token_ids: Iterable[int]) -> Bits:
        """Return a row in which ``token_ids`` are set."""
        flags = np.zeros(self.num_words * 32, np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


def _reason_against(recipe: Recipe) -> str | None:
    """Say why tokens that join by ``recipe`` have no bytes of their own; None if they have."""
    if recipe.joining is Joining.WINDOW:
        return "only its tokenizer can say what several tokens together are"
    if recipe.separator or recipe.replace_after:
        return "what its tokens say depends on where they stand"
    return None


class _Words(TokenizerWrapper):
    """What LLTokenizer reads at its making, and calls to cut forced text into tokens."""

    def __init__(self, words: list[bytes], special: list[int], eos: list[int], backend: Any):
        self.is_tokenizer_wrapper = True
        self.tokens = words
        self.special_token_ids = special
        self.eos_token_id = eos[0] if eos else None  # type: ignore[assignment]
        self.bos_token_id = None
        self._special = frozenset(special)
        self._backend = backend

    def __call__(self, s: str | bytes) -> list[int]:
        """Cut text as the model was taught to, if those tokens say just that, else greedily.

        Of a long text only the beginning: what is forced is cut anew before each token, and only
        the first token is asked for.
        """
        raw = s.encode() if isinstance(s, str) else s
        if len(raw) > _MAX_CUT_BYTES:
            head = raw[:_MAX_CUT_BYTES].decode(errors="ignore").encode()
            return self(head)[:-1]  # the last one may be cut short by the cut
        if self._backend is not None:
            try:
                found = self._backend.encode(raw.decode(), add_special_tokens=False).ids
            except Exception:  # half a character, or a tokenizer that is being written to
                found = []
            if self._said(found) == raw:
                return list(found)
        return self._greedy(raw)

    def _said(self, token_ids: list[int]) -> bytes:
        if any(token >= len(self.tokens) or token in self._special for token in token_ids):
            return b""
        return b"".join(self.tokens[token] for token in token_ids)

    def _greedy(self, raw: bytes) -> list[int]:
        ids, longest = self._by_bytes
        found, at = [], 0
        while at < len(raw):
            for end in range(min(len(raw), at + longest), at, -1):
                if raw[at:end] in ids:
                    found.append(ids[raw[at:end]])
                    at = end
                    break
            else:
                break  # a byte that no token has; llguidance goes on from there
        return found

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], int]:
        ids = {
            word: token
            for token, word in enumerate(self.tokens)
            if word and token not in self._special
        }
        return ids, max(map(len, ids), default=0)
