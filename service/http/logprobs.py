"""Writes log-probabilities in the three forms that clients know; computes none."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.params import TokenLogprob
from radixkv.service.http.replies import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)

_FLOOR = -9999.0
"""What OpenAI writes for minus infinity, which JSON has not."""


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """Write the form of chat completions; None where none were asked for."""
    if entries is None:
        return None
    return {
        "content": [
            {
                "token": e.token,
                "logprob": _finite(e.logprob),
                "bytes": list(e.token_bytes),
                "top_logprobs": [_top(text, raw, lp) for _, text, raw, lp in e.top],
            }
            for e in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, top: int
) -> PromptLogprobs | None:
    """Write vLLM's form: a map from token id to its log-probability for each position."""
    if entries is None:
        return None
    return [None if entry is None else _candidates(entry, top) for entry in entries]


class TextOffsets:
    """Writes the form of text completions, with offsets into the text so far, choice by choice."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
        """Write the next tokens; None where none were asked for."""
        if entries is None:
            return None
        found: TextLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in entries:
            found["text_offset"].append(self._at)
            self._at += len(self._decoder.decode(entry.token_bytes))
            found["tokens"].append(entry.token)
            found["token_logprobs"].append(_finite(entry.logprob))
            found["top_logprobs"].append(_by_text(entry, len(entry.top)))
        return found


def echoed_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    text: str,
    token_text: TokenText,
    top: int,
) -> TextLogprobs:
    """Write the prompt's log-probabilities with offsets into ``text``.

    Special tokens that the tokenizer added and ``text`` does not show take no width.
    """
    found: TextLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    at = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id, entry in zip(token_ids, entries, strict=True):
        shown = token_text.token_text(token_id)
        found["text_offset"].append(min(at, len(text)))
        if not token_text.is_special(token_id):
            at += len(decoder.decode(token_text.token_bytes(token_id)))
        elif text.startswith(shown, at):
            at += len(shown)
        found["tokens"].append(shown)
        found["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        found["top_logprobs"].append(None if entry is None else _by_text(entry, top))
    return found


def joined(first: TextLogprobs, then: TextLogprobs | None) -> TextLogprobs:
    """Append one part's lists to another's."""
    if then is None:
        return first
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + then["top_logprobs"],
        "text_offset": first["text_offset"] + then["text_offset"],
    }


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)


def _top(text: str, raw: bytes, logprob: float) -> TopLogprob:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _by_text(entry: TokenLogprob, top: int) -> dict[str, float]:
    """Likeliest first; of tokens with equal text the likelier one stays, and the chosen always."""
    found: dict[str, float] = {}
    for _, text, _, logprob in entry.top[:top]:
        found.setdefault(text, _finite(logprob))
    found.setdefault(entry.token, _finite(entry.logprob))
    return found


def _candidates(entry: TokenLogprob, top: int) -> dict[str, PromptLogprob]:
    found: dict[str, PromptLogprob] = {
        str(token_id): {"logprob": _finite(lp), "rank": rank, "decoded_token": text}
        for rank, (token_id, text, _, lp) in enumerate(entry.top[:top], start=1)
    }
    found.setdefault(
        str(entry.token_id),
        {"logprob": _finite(entry.logprob), "rank": None, "decoded_token": entry.token},
    )
    return found
