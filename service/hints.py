"""Why two prompts that were meant to begin alike do not: the common causes, told from their texts.

Knows two texts and the place where they part; nothing of tokens, caches or whose they are. A hint
is given where the texts prove the cause, and left out where they only might.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.service.engine.regions import Region, common_chars

Cause = Literal[
    "tool_key_order",
    "json_key_order",
    "timestamp",
    "date",
    "uuid",
    "random_id",
    "counter",
    "stripped_thinking",
    "retokenised",
    "whitespace",
    "template_kwarg",
    "tool_order",
]


@dataclass(frozen=True, slots=True)
class Hint:
    """A cause, and what to do about it."""

    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two texts part: what both have before, and what each has then."""

    before: str
    mine: str
    other: str


_ADVICE: dict[Cause, str] = {
    "tool_key_order": "The tools are the same, with their keys in another order. Tools are shown "
    "to the model as sent: send them with one fixed key order.",
    "json_key_order": "The JSON is the same, with its keys in another order: write it with one "
    "fixed key order.",
    "timestamp": "A time stands here that changes: move it behind what stays, such as into the "
    "last message.",
    "date": "A date stands here that changes: move it behind what stays, such as into the last "
    "message.",
    "uuid": "An id stands here that is new each time: leave it out, or move it behind what stays.",
    "random_id": "An id stands here that is new each time: leave it out, or move it behind what "
    "stays.",
    "counter": "A number stands here that changes: move it behind what stays.",
    "stripped_thinking": "One side has the model's thinking here and the other does not: the "
    "template, or the client, leaves it out of the history. What follows an answer is cached only "
    "if the answer is sent back as it was generated.",
    "retokenised": "The text is the same and the tokens are not: generated text was tokenized "
    "anew. Send token ids back to keep them.",
    "whitespace": "The texts differ in white space alone.",
}

_BACK = 48
_MONTHS = r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_VALUES: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (
        "uuid",
        re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I),
    ),
    (
        "timestamp",
        re.compile(
            r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"
            r"|\b\d{1,2}:\d\d(:\d\d(\.\d+)?)?( ?[AaPp]\.?[Mm]\b)?"
            r"|\b1[0-9]{9}([0-9]{3})?(\.\d+)?\b"
            # As `date` and C's ctime write it: Mon Nov 30 15:22:46 UTC 2026.
            rf"|\b(\w{{3,9}},? )?{_MONTHS} +\d{{1,2}},? \d\d:\d\d(:\d\d)?"
            r"( [A-Z]{2,5})?( \d{4}\b)?"
        ),
    ),
    (
        "date",
        re.compile(
            r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b"
            rf"|\b(\w{{3,9}},? )?\d{{1,2}}\.? {_MONTHS},? \d{{4}}\b"
            rf"|\b(\w{{3,9}},? )?{_MONTHS}\.? \d{{1,2}}(st|nd|rd|th)?,? \d{{4}}\b"
            r"|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
        ),
    ),
    ("random_id", re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b", re.I)),
    ("counter", re.compile(r"\b\d+(\.\d+)?\b")),
)
_THINKING = ("<think>", "<thinking>", "<|thinking|>", "<reasoning>", "[THINK]", "<seed:think>")
_SPACE = re.compile(r"\s+")
_LEAST = 16
"""Characters that must agree behind a difference before it is called the only one."""


def find_hints(fork: Fork, region: Region, *, retokenised: bool = False) -> list[Hint]:
    """Return what explains the fork, the most telling first; [] if nothing is certain.

    ``retokenised``: the caller found the same text on both sides, under other token ids.
    """
    if retokenised:
        return [_hint("retokenised")]
    causes: list[Cause] = []
    order = _json_order(fork)
    if order:
        causes.append("tool_key_order" if region.kind == "tools" else "json_key_order")
    elif order is not None:
        causes.append("whitespace")
    if not causes and _thinking(fork):
        causes.append("stripped_thinking")
    if not causes and _only_space(fork):
        causes.append("whitespace")
    if not causes:
        value = _changed_value(fork, region)
        if value is not None:
            causes.append(value)
    return [_hint(cause) for cause in causes]


def kwarg_hint(names: list[str]) -> Hint:
    """Return the hint for template variables that changed between two prompts."""
    shown = ", ".join(repr(name) for name in names[:4])
    return Hint(
        "template_kwarg",
        f"chat_template_kwargs changed: {shown}. A switch that the template writes near the "
        "beginning makes all that follows another prompt.",
    )


def tool_order_hint() -> Hint:
    """Return the hint for equal tools in another order."""
    return Hint(
        "tool_order",
        "The tools are the same, in another order: send them in one fixed order.",
    )


def tool_keys_hint() -> Hint:
    """Return the hint for equal tools whose keys are in another order."""
    return _hint("tool_key_order")


def _hint(cause: Cause) -> Hint:
    return Hint(cause, _ADVICE[cause])


def _json_order(fork: Fork) -> bool | None:
    """Tell of JSON around the fork whether its keys' order differs (True), or its spaces (False).

    None if there is no JSON on both sides that says the same.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_Pairs)
    for start in _open_braces(fork.before)[:8]:
        head = fork.before[start:]
        try:
            mine, my_end = decoder.raw_decode(head + fork.mine)
            other, other_end = decoder.raw_decode(head + fork.other)
        except ValueError:
            continue
        if min(my_end, other_end) <= len(head):
            continue  # it ended before the fork
        if mine == other:
            return not _same_order(mine, other)
    return None


class _Pairs(dict[str, Any]):
    """A JSON object that remembers the order of its keys, and is equal whatever it was."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _same_order(a: Any, b: Any) -> bool:
    if isinstance(a, _Pairs) and isinstance(b, _Pairs):
        return a.names == b.names and all(_same_order(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return all(map(_same_order, a, b))
    return True


def _open_braces(text: str) -> list[int]:
    """Return the places of braces and brackets still open at the end, the outermost first."""
    depth, found = 0, []
    for at in range(len(text) - 1, -1, -1):
        if text[at] in "}]":
            depth += 1
        elif text[at] in "{[":
            if depth:
                depth -= 1
            else:
                found.append(at)
    return found[::-1]


def _thinking(fork: Fork) -> bool:
    """Tell whether exactly one side begins its thinking here; a tag may begin before the fork."""
    near = fork.before[-16:]

    def begins(text: str) -> bool:
        window = near + text[:64]
        return any(
            (at := window.find(tag)) >= 0
            and at + len(tag) > len(near)
            and not window[len(near) : at].strip()  # else something else differs first
            for tag in _THINKING
        )

    return begins(fork.mine) != begins(fork.other)


def _only_space(fork: Fork) -> bool:
    mine, other = _SPACE.sub("", fork.mine), _SPACE.sub("", fork.other)
    length = min(len(mine), len(other))
    if common_chars(mine, other) < min(length, 4 * _LEAST) or not length:
        return False
    # The side that ended may have gone on otherwise; a few characters prove nothing.
    return length >= _LEAST or len(mine) == len(other)


def _changed_value(fork: Fork, region: Region) -> Cause | None:
    """Name the kind of value that stands across the fork on both sides, if it is of one kind.

    In what users and models say, a value that changes is no fault, unless all that follows it is
    the same.
    """
    near = fork.before[-_BACK:]
    for cause, pattern in _VALUES:
        mine = _across(pattern, near + fork.mine[:_BACK], len(near))
        other = _across(pattern, near + fork.other[:_BACK], len(near))
        if mine is None or other is None or mine.group() == other.group():
            continue
        if region.kind in ("system", "tools") or (
            region.kind == "role_header" and cause != "counter"
        ):
            return cause
        rest = fork.mine[mine.end() - len(near) :], fork.other[other.end() - len(near) :]
        if common_chars(*rest) >= _LEAST:
            return cause
    return None


def _across(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Return a match that begins at or before ``at`` and does not end before it."""
    for match in pattern.finditer(text):
        if match.start() <= at <= match.end():
            return match
    return None
