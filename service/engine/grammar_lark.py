"""Read as much of a Lark grammar as it takes to tell whether its rules can end.

Not a parser of Lark: llguidance has one, and says what is wrong. What is not understood here is
taken for something that can end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.service.engine.grammar_ends import (
    NOTHING,
    AllOf,
    Need,
    OneOf,
    Ref,
    can_end,
    schema_rules,
)

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<word>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    |(?P<inline>%(?:json|regex|lark)\b)
    |(?P<statement>%[a-z]+)
    |(?P<name>[?!]*[A-Za-z_][\w-]*)
    |(?P<number>[0-9]+)
    |(?P<mark>->|\.\.|[:|()\[\]*+?~{},.=])""",
    re.VERBOSE,
)
Token = tuple[str, object]


class _Unread(Exception):
    """Something that we do not know."""


def lark_can_end(source: str) -> bool:
    """Whether a text of the grammar can be finite."""
    try:
        rules = _Reader(source).rules()
        return can_end(rules, "start")
    except (_Unread, IndexError, RecursionError):
        return True


class _Reader:
    """Goes through the tokens once."""

    def __init__(self, source: str) -> None:
        self._tokens = list(_tokens(source))
        self._at = 0
        self._rules: dict[Hashable, Need] = {}

    def rules(self) -> dict[Hashable, Need]:
        """Return what each rule needs."""
        while self._peek()[0] != "end":
            kind, text = self._take()
            if kind == "newline":
                continue
            if kind == "statement":
                while self._peek()[0] not in ("newline", "end"):
                    self._take()
                continue
            if kind != "name":
                raise _Unread
            while self._peek() != ("mark", ":"):  # attributes and priority
                if self._take()[0] in ("newline", "end"):
                    raise _Unread
            self._take()
            self._rules[str(text).lstrip("?!")] = self._alternatives()
        return self._rules

    def _alternatives(self, closing: str | None = None) -> Need:
        found = [self._sequence(closing)]
        while self._goes_on():
            found.append(self._sequence(closing))
        return found[0] if len(found) == 1 else OneOf(tuple(found))

    def _goes_on(self) -> bool:
        """Whether a ``|`` comes, perhaps on a later line, and take it."""
        at = self._at
        while self._tokens[at][0] == "newline":
            at += 1
        if self._tokens[at] != ("mark", "|"):
            return False
        self._at = at + 1
        return True

    def _sequence(self, closing: str | None) -> Need:
        parts: list[Need] = []
        while True:
            kind, text = self._peek()
            if closing is not None and kind == "newline":
                self._take()
            elif kind in ("newline", "end") or text == "|" or (text == closing and kind == "mark"):
                return parts[0] if len(parts) == 1 else AllOf(tuple(parts))
            elif (kind, text) == ("mark", "->"):
                self._take()
                self._take()
            else:
                parts.append(self._counted(self._atom()))

    def _atom(self) -> Need:
        kind, text = self._take()
        if kind in ("word", "inline"):
            if self._peek() == ("mark", ".."):
                self._take()
                self._take()
            return self._inline(text)
        if kind == "name":
            return Ref(text) if str(text)[0].islower() or str(text)[0] == "_" else NOTHING
        if (kind, text) in (("mark", "("), ("mark", "[")):
            closing = ")" if text == "(" else "]"
            inner = self._alternatives(closing)
            while self._peek()[0] == "newline":
                self._take()
            if self._take() != ("mark", closing):
                raise _Unread
            return inner if text == "(" else NOTHING
        raise _Unread

    def _inline(self, value: object) -> Need:
        if not isinstance(value, _Schema):
            return NOTHING
        here = len(self._rules), self._at

        def moved(need: Need) -> Need:
            if isinstance(need, Ref):
                return Ref((here, need.rule))
            return type(need)(tuple(map(moved, need.parts)))

        for name, need in schema_rules(value.schema).items():
            self._rules[here, name] = moved(need)
        return Ref((here, "#"))

    def _counted(self, need: Need) -> Need:
        kind, text = self._peek()
        if kind == "mark" and text in ("?", "*", "+"):
            self._take()
            return need if text == "+" else NOTHING
        if kind == "mark" and text == "~":
            self._take()
            least = self._take()[1]
            if self._peek() == ("mark", ".."):
                self._take()
                self._take()
            return need if least != "0" else NOTHING
        if kind == "mark" and text == "{":
            least = self._tokens[self._at + 1]
            while self._take() != ("mark", "}"):
                if self._peek()[0] in ("newline", "end"):
                    raise _Unread
            return need if least[0] == "number" and least[1] != "0" else NOTHING
        return need

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]


@dataclass(frozen=True, slots=True)
class _Schema:
    """A schema written into a rule."""

    schema: object


def _next(source: str, at: int) -> int:
    """Return where the next character is that is not blank."""
    while at < len(source) and source[at].isspace():
        at += 1
    return at


def _tokens(source: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise _Unread
        at, kind = match.end(), str(match.lastgroup)
        if kind == "blank":
            continue
        value: object = match[0]
        if kind == "inline":
            if match[0] == "%lark":
                raise _Unread
            try:
                schema, at = json.JSONDecoder().raw_decode(source, _next(source, at))
            except (ValueError, RecursionError):
                raise _Unread from None
            value = _Schema(schema) if match[0] == "%json" else match[0]
        found.append((kind, value))
    return [*found, ("end", None)]
