"""Finds calls in a model's answer as it comes, for each way in which models write them.

Knows markers and text; nothing of tokens, templates or clients. Whatever is no call is text, so no
answer is ever lost or refused; and however the text is cut into pieces, the same comes out of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, Protocol

from radixkv.service.tools_json import ObjectReader, parsed_object
from radixkv.service.tools_pieces import (
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    Piece,
    Text,
    joined,
)
from radixkv.service.tools_reading import CallsReader

_SPACE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_HEAD = 256
"""Characters between a marker and the arguments, in which a name and an id must be."""


class ToolParser(Protocol):
    """Reads one answer. White space right before a call, and between calls, belongs to them."""

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer, and return what is certain by now."""
        ...

    def close(self) -> list[Piece]:
        """Return what is left when the answer ends."""
        ...


def parse(parser: ToolParser, text: str) -> Answer:
    """Read a whole answer."""
    return joined([*parser.push(text), *parser.close()])


class _Reader(Protocol):
    """What stands behind a marker."""

    index: int
    state: Literal["open", "done", "broken"]

    @property
    def held(self) -> str: ...

    def push(self, text: str, pieces: list[Piece]) -> int: ...

    def end(self, pieces: list[Piece]) -> None: ...


class MarkedParser:
    """Calls stand behind ``begin``, and before ``end`` where there is one; both may be left off at
    the answer's end. ``named``: a call may be ``name{...}`` with ``[ARGS]`` or ``[CALL_ID]id`` in
    between, and not only JSON."""

    def __init__(self, begin: str, end: str = "", *, named: bool = False) -> None:
        self._begin, self._end, self._named = begin, end, named
        self._mode: Literal["text", "begun", "calls", "after"] = "text"
        self._buffer = ""
        self._lead = ""
        self._index = 0
        self._reader: _Reader | None = None

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        steps = {
            "text": self._text,
            "begun": self._begun,
            "calls": self._calls,
            "after": self._after,
        }
        while steps[self._mode](pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        pieces: list[Piece] = []
        left = self._buffer
        if self._mode == "begun":
            left = self._lead + left
        elif self._reader is not None:
            self._reader.end(pieces)
            left = self._reader.held
        elif self._mode == "after" or (self._index and not left.strip(_SPACE)):
            left = ""
        self._buffer, self._reader = "", None
        if left:
            pieces.append(Text(left))
        return pieces

    # Each step takes of the buffer what it can; False: it needs more text.

    def _text(self, pieces: list[Piece]) -> bool:
        at = self._buffer.find(self._begin)
        if at < 0:
            held = _overlap(self._buffer, self._begin)
            said = self._buffer[: len(self._buffer) - held].rstrip(_SPACE)
        else:
            said = self._buffer[:at].rstrip(_SPACE)
        if said:
            pieces.append(Text(said))
        if at < 0:
            self._buffer = self._buffer[len(said) :]
            return False
        self._lead = self._buffer[len(said) : at + len(self._begin)]
        self._buffer = self._buffer[at + len(self._begin) :]
        self._mode = "begun"
        return True

    def _begun(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE)
        if not shown:
            return False
        if self._named and shown[0] not in "[{":
            self._reader = _NamedReader(self._index, self._lead)
        else:
            self._reader = CallsReader(self._index, lead=self._lead)
        self._mode = "calls"
        return True

    def _calls(self, pieces: list[Piece]) -> bool:
        reader = self._reader
        assert reader is not None
        self._buffer = self._buffer[reader.push(self._buffer, pieces) :]
        if reader.state == "open":
            return False
        self._index, self._reader = reader.index, None
        if reader.state == "done":
            self._mode = "after" if self._end else "text"
            return True
        if reader.held:
            pieces.append(Text(reader.held))
        self._mode = "text"
        return True

    def _after(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE)
        if shown.startswith(self._end):
            self._buffer = shown[len(self._end) :]
        elif self._end.startswith(shown):
            return False
        self._mode = "text"
        return True


class BareParser:
    """Calls are the whole answer, with nothing before them, so only an object that names one of the
    functions and has arguments is taken for one. ``;`` or white space divides several."""

    def __init__(self, names: Collection[str], tag: str = "") -> None:
        self._names, self._tag = names, tag
        self._mode: Literal["open", "calls", "text"] = "open"
        self._buffer = ""
        self._index = 0
        self._reader: CallsReader | None = None

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        steps = {"open": self._open, "calls": self._calls, "text": self._text}
        while steps[self._mode](pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        pieces: list[Piece] = []
        left = self._buffer
        if self._reader is not None:
            self._reader.end(pieces)
            left = self._reader.held
        elif self._index and not left.strip(_SPACE + ";"):
            left = ""
        self._buffer, self._reader = "", None
        if left:
            pieces.append(Text(left))
        return pieces

    def _open(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE + ";" if self._index else _SPACE)
        if not self._index and self._tag:
            if shown != self._tag and self._tag.startswith(shown):
                return False
            shown = shown.removeprefix(self._tag).lstrip(_SPACE)
        if not shown:
            return False
        if shown[0] != "{":
            self._mode = "text"
            return True
        lead = self._buffer[: len(self._buffer) - len(shown)]
        self._reader = CallsReader(self._index, self._names, True, lead=lead)
        self._buffer, self._mode = shown, "calls"
        return True

    def _calls(self, pieces: list[Piece]) -> bool:
        reader = self._reader
        assert reader is not None
        self._buffer = self._buffer[reader.push(self._buffer, pieces) :]
        if reader.state == "open":
            return False
        self._index, self._reader = reader.index, None
        self._mode = "open" if reader.state == "done" else "text"
        if reader.state == "broken" and reader.held:
            pieces.append(Text(reader.held))
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        if self._buffer:
            pieces.append(Text(self._buffer))
        self._buffer = ""
        return False


class _NamedReader:
    """A call written as its name and then the arguments."""

    def __init__(self, index: int, lead: str) -> None:
        self.index = index
        self.state: Literal["open", "done", "broken"] = "open"
        self._head = lead
        self._lead = len(lead)
        self._arguments: ObjectReader | None = None

    @property
    def held(self) -> str:
        return self._head if self._arguments is None else ""

    def push(self, text: str, pieces: list[Piece]) -> int:
        at = 0
        if self._arguments is None:
            brace = text.find("{")
            at = len(text) if brace < 0 else brace
            self._head += text[:at]
            if len(self._head) - self._lead > _MAX_HEAD:
                self.state = "broken"
                return at
            if brace < 0:
                return at
            name = self._name()
            if name is None:
                self.state = "broken"
                return at
            self._arguments = ObjectReader()
            pieces.append(CallStart(self.index, name))
        taken = self._arguments.push(text[at:])
        if taken:
            pieces.append(CallArguments(self.index, text[at : at + taken]))
        self.state = self._arguments.state
        if self.state == "done" and parsed_object(self._arguments.text) is None:
            self.state = "broken"
        if self.state != "open":
            self.end(pieces)
            self.index += 1
        return at + taken

    def end(self, pieces: list[Piece]) -> None:
        if self._arguments is not None:
            raw = self._head + self._arguments.text
            pieces.append(CallEnd(self.index, self.state == "done", raw))

    def _name(self) -> str | None:
        head = self._head[self._lead :].removesuffix("[ARGS]")
        name = head.partition("[CALL_ID]")[0].strip(_SPACE)
        return name if _NAME.fullmatch(name) else None


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
