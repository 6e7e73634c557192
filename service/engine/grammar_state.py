"""Hold logits to the grammars of their choices: where each is, and what may come next.

Knows token ids, bits and llguidance's matchers; nothing of schemas, requests or text.

*The end.* Tokens that end a sequence are allowed exactly where the grammar accepts. A choice whose
grammar can only end is over with the token that made it so; none is drawn for the end. What is
to be put off (``ignore_eos``, ``min_tokens``) is, as long as the grammar allows anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance.numpy as ll_numpy
import numpy as np
import torch
from llguidance import LLMatcher

from radixkv.errors import InvalidRequest

if TYPE_CHECKING:
    from radixkv.service.engine.grammar_vocab import Bits, Vocabulary

_ALL = np.int32(-1)


class GrammarState:
    """Where one choice is in its grammar. It lives with the choice: a preemption leaves it alone,
    for what is computed again is not drawn again. One thread at a time."""

    __slots__ = ("_avoid", "_avoid_until", "_num_tokens", "error", "matcher", "vocabulary")

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        avoid: Bits | None = None,
        avoid_until: int | None = None,
    ) -> None:
        """``matcher`` is this choice's own. Tokens ``avoid`` are put off for ``avoid_until``
        tokens (None: for good), where anything else is left."""
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.error: str | None = None
        """What the grammar failed with; nothing more can be drawn then."""
        self._num_tokens = 0
        self._avoid = avoid
        self._avoid_until = avoid_until

    def take(self, token_id: int) -> bool:
        """Take note of a token drawn; returns whether nothing may follow it."""
        self._num_tokens += 1
        if not self.matcher.consume_token(token_id) or self.matcher.is_error():
            self.note_error()
            return False
        return self.matcher.is_stopped()

    def note_error(self) -> None:
        """Keep what the matcher fails with."""
        self.error = in_brief(self.matcher.get_error()) or "the grammar does not allow this token"

    def narrow(self, allowed: Bits) -> None:
        """Take from ``allowed``, in place, what the grammar allows and the request puts off."""
        if self._num_tokens == 0 and self.vocabulary.not_first is not None:
            allowed &= ~self.vocabulary.not_first
        if self._avoid is None:
            return
        if self._avoid_until is None or self._num_tokens < self._avoid_until:
            rest = allowed & ~self._avoid
            if rest.any():
                allowed[:] = rest


def hold(logits: torch.Tensor, states: Sequence[GrammarState]) -> None:
    """Set the logits of all tokens that are not allowed to -inf, in place; all rows at once.

    logits    [R, V], row ``i`` is that of ``states[i]``
    A grammar that fails (one too complex to go on) leaves its row as it is, and has an ``error``.
    """
    bits = allowed_bits(states)
    vocab = logits.shape[1]
    if logits.is_cpu:
        banned = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
        logits.masked_fill_(torch.from_numpy(banned.view(np.bool_)), -torch.inf)
        return
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> places) & 1).flatten(1)[:, :vocab]
    logits.masked_fill_(allowed == 0, -torch.inf)


def allowed_bits(states: Sequence[GrammarState]) -> np.ndarray:
    """Return the tokens that may come next in each grammar, int32 ``[R, words]``."""
    vocabulary = states[0].vocabulary
    bits = np.zeros((len(states), vocabulary.num_words), np.int32)
    if len(states) == 1:
        ll_numpy.fill_next_token_bitmask(states[0].matcher, bits)
    else:
        jobs = [(state.matcher, row) for row, state in enumerate(states)]
        ll_numpy.fill_next_token_bitmask_par(vocabulary.executor, jobs, bits)
    for row, state in zip(bits, states, strict=True):
        if state.matcher.is_error():
            state.note_error()
            row[:] = _ALL
        else:
            state.narrow(row)
    return bits


def failure(error: str) -> InvalidRequest:
    """What a request fails with whose grammar cannot go on."""
    return InvalidRequest(f"the answer's grammar cannot be followed any further: {error}")


def in_brief(message: str, limit: int = 600) -> str:
    """Return llguidance's message without what it says of itself, and not at any length."""
    text = message.replace("<non-verbose/>", "").strip()
    if text in ("NoExtension", "NoExtensionBias"):
        return "no text can look like that"
    return text if len(text) <= limit else text[:limit] + "..."
