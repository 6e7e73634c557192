"""From an account of tokens to a record that people read: texts, the template's regions, hints.

Knows the prompt as it was sent and the engine's account of it. Shows text of the caller's own
prompts alone: the account compares with nothing outside its namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.service.engine.explaining import Explained
from radixkv.service.engine.regions import PROMPT, Messages, Region, common_chars, region_at
from radixkv.service.hints import Fork, Hint, find_hints
from radixkv.service.http.explain_shapes import (
    DivergenceReply,
    ExplainRecord,
    RegionReply,
)
from radixkv.service.http.past_prompts import Comparison

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine

SHOWN_TOKENS = 24
SHOWN_CHARS = 160
_READ_TOKENS = 2048
"""Tokens on both sides of the fork that are read for hints."""
_SAME_TOKENS = 4
"""Tokens whose text must be equal on both sides before we say that only the ids differ; fewer if a
special token ends the text."""


@dataclass(frozen=True, slots=True)
class AskedChat:
    """The chat that a prompt was rendered from, as the template is shown it."""

    messages: Messages
    rendering: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of ``Prompting.render_text`` beside the messages."""


def record_of(
    engine: Engine,
    explained: Explained,
    token_ids: Sequence[int],
    chat: AskedChat | None = None,
    nearest: Comparison | None = None,
) -> ExplainRecord:
    """Write the record of ``explained``. May take milliseconds for a long prompt.

    ``chat`` is None for a prompt that was no chat. ``nearest`` compares it with the past prompt
    that is most like it, if one is remembered.
    """
    divergence: DivergenceReply | None = None
    hints: list[Hint] = []
    at = explained.divergence
    if at is not None and explained.sibling_tokens and at < len(token_ids):
        divergence, hints = _fork(engine, at, explained.sibling_tokens, token_ids, chat)
    if not hints and nearest is not None and explained.resident_tokens < explained.num_tokens // 2:
        hints = list(nearest.hints)  # what two texts do not show, two sets of fields may
    return {
        "prompt_tokens": explained.num_tokens,
        "resident_tokens": explained.resident_tokens,
        "missing_tokens": explained.num_tokens - explained.resident_tokens,
        "resident": {"device": explained.resident_tokens, "host": None},
        "reasons": dict(explained.reasons),
        "divergence": divergence,
        "hints": [{"cause": hint.cause, "message": hint.message} for hint in hints],
        "identity": explained.identity.digest().hex(),
        "differs_in": list(explained.differs_in),
    }


def _fork(
    engine: Engine,
    at: int,
    sibling: Sequence[int],
    token_ids: Sequence[int],
    chat: AskedChat | None,
) -> tuple[DivergenceReply, list[Hint]]:
    text_of = engine.prompting.text_of
    start = engine.prompting.char_start(token_ids, at)  # both may have the first half of one
    half = [*token_ids[start:at]]
    before = text_of(token_ids[max(0, start - _READ_TOKENS) : start])
    mine = text_of(token_ids[start : at + _READ_TOKENS])
    other = text_of([*half, *sibling[:_READ_TOKENS]])
    shared = common_chars(mine, other)
    ends = token_ids[at : at + _SAME_TOKENS], sibling[:_SAME_TOKENS]
    begun = max(_begun(engine, [*half, *ids]) for ids in ends)
    retokenised = 0 < begun <= shared
    alike = 0 if retokenised else shared  # the place is where the texts part, or else the tokens
    region = PROMPT if chat is None else _region(engine, start, alike, token_ids, chat)
    fork = Fork(before + mine[:shared], mine[shared:], other[shared:])
    reply: DivergenceReply = {
        "token": at,
        "region": _region_reply(region),
        "shared_text": text_of(token_ids[max(0, start - SHOWN_TOKENS) : start])[-SHOWN_CHARS:],
        "this_text": text_of(token_ids[start : at + SHOWN_TOKENS])[:SHOWN_CHARS],
        "other_text": text_of([*half, *sibling[:SHOWN_TOKENS]])[:SHOWN_CHARS],
    }
    return reply, find_hints(fork, region, retokenised=retokenised)


def _begun(engine: Engine, token_ids: Sequence[int]) -> int:
    """Count the characters of tokens up to the first special one."""
    special = (i for i, token in enumerate(token_ids) if engine.token_text.is_special(token))
    return len(engine.prompting.text_of(token_ids[: next(special, len(token_ids))]))


def _region(
    engine: Engine, at: int, shared: int, token_ids: Sequence[int], chat: AskedChat
) -> Region:
    """Return the part of the chat that lies ``shared`` characters behind the start of a token."""
    prompting, rendering = engine.prompting, dict(chat.rendering)

    def render(messages: Messages) -> str:
        return prompting.render_text(messages, **rendering)

    def render_without_tools() -> str:
        return prompting.render_text(chat.messages, **(rendering | {"tools": None}))

    text = render(chat.messages)
    place = prompting.offset(text, token_ids, at) + shared
    return region_at(
        min(place, len(text)),
        text,
        chat.messages,
        render,
        render_without_tools if rendering.get("tools") else None,
    )


def _region_reply(region: Region) -> RegionReply:
    return {
        "kind": region.kind,
        "message": region.message,
        "role": region.role,
        "label": str(region),
    }
