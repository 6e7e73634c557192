"""Where in a rendered chat its tools, a message, or a part of one ends: in tokens of the prompt.

Knows templates and tokenizers as ``Prompting`` shows them; nothing of why anybody wants to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.engine.prompting import Prompting
from radixkv.service.engine.regions import common_chars
from radixkv.tokens import common_prefix, encode

_OTHER = "\ue000"
"""A character of private use: what follows the cut hardly begins with it."""
_OTHER_TOOL = {"type": "function", "function": {"name": _OTHER, "parameters": {}}}


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in a chat: behind ``messages[message]``, or behind the beginning ``text`` of it and
    the first ``calls`` of its calls; or, without a message, behind the first ``tools`` tools."""

    message: int | None
    text: str | None = None
    """None: the whole message, with all that the template writes after it."""
    calls: int = 0
    tools: int = 0


def render_cut(
    prompting: Prompting,
    messages: Sequence[Mapping[str, Any]],
    cuts: Sequence[Cut],
    **rendering: Any,
) -> tuple[list[int], list[int]]:
    """Render ``messages`` into token ids, and find for each cut how many of them come before it.

    What comes before a cut is what the chat with and without the rest has in common, as text and
    then as tokens: a token across the cut counts as behind it. Where the template writes something
    else already before the cut, it ends there. Each cut costs a rendering and a tokenization of
    what comes before it. Raises InvalidRequest as ``Prompting.render`` does.
    """
    text = prompting.render_text(messages, **rendering)
    ids = prompting.tokenize(text, add_special_tokens=False)
    if not cuts:
        return ids, []
    whole = encode(ids)
    positions = []
    for cut in cuts:
        before = text[: _common(prompting, messages, cut, text, rendering)]
        tokens = encode(prompting.tokenize(before, add_special_tokens=False))
        positions.append(common_prefix(whole, tokens))
    return ids, positions


def _common(
    prompting: Prompting,
    messages: Sequence[Mapping[str, Any]],
    cut: Cut,
    text: str,
    rendering: Mapping[str, Any],
) -> int:
    """Count the characters of ``text`` that come before ``cut``."""
    if cut.message is None:
        tools = [*(rendering.get("tools") or ())[: cut.tools], _OTHER_TOOL]
        return common_chars(text, prompting.render_text(messages, **{**rendering, "tools": tools}))
    before, last = list(messages[: cut.message]), messages[cut.message]
    shown = last if cut.text is None else _beginning(last, cut.text, cut.calls)
    closed = {**rendering, "add_generation_prompt": False, "continue_final_message": False}
    try:
        without = prompting.render_text([*before, shown], **closed)
    except InvalidRequest:
        # The template wants more than that, such as a user's turn after the system's: then let
        # other words follow.
        shown = {**last, "content": str(shown["content"]) + _OTHER}
        rest = messages[cut.message + 1 :]
        without = prompting.render_text([*before, shown, *rest], **rendering)
    return common_chars(text, without)


def _beginning(message: Mapping[str, Any], text: str, calls: int) -> dict[str, Any]:
    """Return a message that ends early, without the calls that come after."""
    shown = {**message, "content": text}
    if kept := (shown.pop("tool_calls", None) or [])[:calls]:
        shown["tool_calls"] = kept
    return shown
