"""Reads one JSON object that comes in pieces, and says where its members begin and end.

Knows JSON's grammar, strictly; nothing of what an object means. Each character is looked at once.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string, what ends and escapes nothing
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_MAX_NUMBER_CHARS = 400
MAX_DEPTH = 64
"""Objects and arrays within each other. Deeper ones are broken, for what reads them recurses."""


class _Wants(Enum):
    """What may come next, outside of strings, numbers and words."""

    VALUE = "value"
    VALUE_OR_END = "value or ]"
    KEY = "key"
    KEY_OR_END = "key or }"
    COLON = "colon"
    MORE = "comma or end"


@dataclass(slots=True)
class Span:
    """Where a part of the text is; ``end`` is None while it goes on."""

    start: int
    end: int | None = None


@dataclass(slots=True)
class Member:
    """A member of the outermost object."""

    key: Span
    value: Span | None = None


@dataclass(slots=True)
class ObjectReader:
    """One object, as its text is pushed. Offsets count from the object's first character."""

    text: str = ""
    """What was taken so far."""
    members: list[Member] = field(default_factory=list)
    state: Literal["open", "done", "broken"] = "open"
    _stack: list[str] = field(default_factory=list)
    _wants: _Wants = _Wants.VALUE
    _in: Literal["", "string", "number", "word"] = ""
    _is_key: bool = False
    _start: int = 0
    _escape: str = ""

    def push(self, text: str) -> int:
        """Take ``text`` up to the object's end or its first fault; returns how much was taken."""
        base, at = len(self.text), 0
        while at < len(text) and self.state == "open":
            if self._in == "string":
                at = self._string(text, at, base)
            elif self._in:
                at = self._scalar(text, at, base)
            else:
                at = self._outside(text, at, base)
        self.text += text[:at]
        return at

    def span(self, span: Span) -> str:
        """Return the text of a span, as far as it has come."""
        return self.text[span.start : span.end]

    def _outside(self, text: str, at: int, base: int) -> int:
        char = text[at]
        if char in _SPACE and self._stack:
            return at + 1
        wants = self._wants
        if char == '"' and wants is not _Wants.COLON and wants is not _Wants.MORE and self._stack:
            self._in, self._is_key = "string", wants in (_Wants.KEY, _Wants.KEY_OR_END)
            self._begin(base + at)
        elif char in "{[" and wants in (_Wants.VALUE, _Wants.VALUE_OR_END):
            if (not self._stack and char == "[") or len(self._stack) == MAX_DEPTH:
                return self._break(at)
            if self._stack:
                self._begin(base + at)
            self._stack.append(char)
            self._wants = _Wants.KEY_OR_END if char == "{" else _Wants.VALUE_OR_END
        elif char in "}]" and self._may_end(char):
            self._leave(base + at + 1)
        elif char == ":" and wants is _Wants.COLON:
            self._wants = _Wants.VALUE
        elif char == "," and wants is _Wants.MORE:
            self._wants = _Wants.KEY if self._stack[-1] == "{" else _Wants.VALUE
        elif (
            self._stack
            and wants in (_Wants.VALUE, _Wants.VALUE_OR_END)
            and char in "-0123456789tfn"
        ):
            self._in = "word" if char in "tfn" else "number"
            self._escape = ""
            self._begin(base + at)
            return at  # read again, as its first character
        else:
            return self._break(at)
        return at + 1

    def _may_end(self, char: str) -> bool:
        if char == "}":
            return self._stack[-1:] == ["{"] and self._wants in (_Wants.KEY_OR_END, _Wants.MORE)
        return self._stack[-1:] == ["["] and self._wants in (_Wants.VALUE_OR_END, _Wants.MORE)

    def _string(self, text: str, at: int, base: int) -> int:
        char = text[at]
        if self._escape:
            good = (
                char in '"\\/bfnrtu' if self._escape == "\\" else char in "0123456789abcdefABCDEF"
            )
            if not good:
                return self._break(at)
            self._escape += char
            if self._escape[1] != "u" or len(self._escape) == 6:
                self._escape = ""
            return at + 1
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain.end()
        if char == "\\":
            self._escape = "\\"
        elif char == '"':
            self._in = ""
            self._end(base + at + 1)
        else:
            return self._break(at)  # a control character
        return at + 1

    def _scalar(self, text: str, at: int, base: int) -> int:
        char = text[at]
        if char in ",]}" or char in _SPACE:
            whole = self._escape
            if not (whole in _WORDS if self._in == "word" else _is_number(whole)):
                return self._break(at)
            self._in, self._escape = "", ""
            self._end(base + at)
            return at
        self._escape += char
        if self._in == "word":
            good = any(word.startswith(self._escape) for word in _WORDS)
        else:
            good = char in "+-.eE0123456789"
        return at + 1 if good else self._break(at)

    def _begin(self, offset: int) -> None:
        """A key or value begins."""
        if len(self._stack) != 1:
            return
        if self._in == "string" and self._is_key:
            self.members.append(Member(Span(offset)))
        else:
            self.members[-1].value = Span(offset)

    def _end(self, offset: int) -> None:
        """A string, number or word has ended."""
        if self._is_key:
            self._is_key, self._wants = False, _Wants.COLON
            if len(self._stack) == 1:
                self.members[-1].key.end = offset
            return
        self._wants = _Wants.MORE
        self._close(offset)

    def _leave(self, offset: int) -> None:
        """An object or array has ended."""
        self._stack.pop()
        self._wants = _Wants.MORE
        if self._stack:
            self._close(offset)
        else:
            self.state = "done"

    def _close(self, offset: int) -> None:
        if len(self._stack) == 1:
            value = self.members[-1].value
            assert value is not None
            value.end = offset

    def _break(self, at: int) -> int:
        self.state = "broken"
        return at


def parsed_object(text: str) -> dict[str, Any] | None:
    """Return the object that ``text`` is; None if it is none, or one that cannot be written again:
    nested too deeply, or with numbers or halves of characters that JSON has not."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return value
        level = [x for item in level for x in (item.values() if type(item) is dict else item)]
    return None if any(isinstance(item, dict | list) for item in level) else value


def _is_number(text: str) -> bool:
    good = len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text) is not None
    return good and math.isfinite(float(text))
