"""What a model's answer is made of: pieces of text, and calls that begin, go on and end.

Knows calls; nothing of how a model writes them, nor of how a client is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Some text to be shown."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a function; ``index`` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete, or (``whole`` is false) broke off or turned out to be no JSON."""

    index: int
    whole: bool
    raw: str
    """All that the model wrote for it."""


Piece = Text | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call."""

    name: str
    arguments: str
    """The JSON text of an object, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its text, and its calls in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def joined(pieces: Iterable[Piece]) -> Answer:
    """Put an answer's pieces together; a call that is not whole is text, as the model wrote it."""
    texts: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    calls: list[ToolCall] = []
    for piece in pieces:
        match piece:
            case Text(text):
                texts.append(text)
            case CallStart(index, name):
                names[index], arguments[index] = name, []
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, True, _):
                calls.append(ToolCall(names[index], "".join(arguments[index])))
            case CallEnd(_, False, raw):
                texts.append(raw)
    return Answer("".join(texts), tuple(calls))
