"""Finds calls in a model's answer as it comes, for each way in which models write them.

Knows markers and text; nothing of tokens, templates or clients. Whatever is no call is text, so no
answer is ever lost or refused; and however the text is cut into pieces, the same comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

from radixkv.service.tools_named import NamedReader
from radixkv.service.tools_pieces import Answer, Piece, Text, joined
from radixkv.service.tools_reading import CallsReader

_SPACE = " \t\n\r"
_Step = Callable[[list[Piece]], bool]
"""Takes of the buffer what it can; False: it needs more text."""


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
    """Reads calls until they end, or turn out to be none."""

    index: int
    state: Literal["open", "done", "broken"]

    @property
    def held(self) -> str: ...

    def push(self, text: str, pieces: list[Piece]) -> int: ...

    def end(self, pieces: list[Piece]) -> None: ...


class _Parser:
    """What both ways have in common: a buffer, steps through it, and a reader of the calls."""

    def __init__(self, first: _Step) -> None:
        self._step = first
        self._buffer = ""
        self._index = 0
        self._reader: _Reader | None = None

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def _read(self, pieces: list[Piece], *, done: _Step, broken: _Step) -> bool:
        """Let the reader read; when it ends, go on with one of the steps."""
        reader = self._reader
        assert reader is not None
        self._buffer = self._buffer[reader.push(self._buffer, pieces) :]
        if reader.state == "open":
            return False
        self._index, self._reader = reader.index, None
        self._step = done if reader.state == "done" else broken
        if reader.state == "broken" and reader.held:
            pieces.append(Text(reader.held))
        return True

    def _close(self, left: str, between: str) -> list[Piece]:
        """End the reader, or say what is ``left``: not what is only ``between`` calls."""
        pieces: list[Piece] = []
        if self._reader is not None:
            self._reader.end(pieces)
            left = self._reader.held
        elif self._index and not left.strip(between):
            left = ""
        self._buffer, self._reader = "", None
        if left:
            pieces.append(Text(left))
        return pieces


class MarkedParser(_Parser):
    """Calls stand behind ``begin``, and before ``end`` where there is one; both may be left off at
    the answer's end. ``named``: a call may be ``name{...}`` with ``[ARGS]`` or ``[CALL_ID]id`` in
    between, and not only JSON."""

    def __init__(self, begin: str, end: str = "", *, named: bool = False) -> None:
        super().__init__(self._text)
        self._begin, self._end, self._named = begin, end, named
        self._lead = ""
        """The marker that was read, with the white space before it, until a reader has it."""

    def close(self) -> list[Piece]:
        left = "" if self._step == self._after else self._lead + self._buffer
        return self._close(left, _SPACE)

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
        self._step = self._begun
        return True

    def _begun(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE)
        if not shown:
            return False
        if self._named and shown[0] not in "[{":
            self._reader = NamedReader(self._index, self._lead)
        else:
            self._reader = CallsReader(self._index, lead=self._lead)
        self._lead, self._step = "", self._calls
        return True

    def _calls(self, pieces: list[Piece]) -> bool:
        then = self._after if self._end else self._text
        return self._read(pieces, done=then, broken=self._text)

    def _after(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE)
        if shown.startswith(self._end):
            self._buffer = shown[len(self._end) :]
        elif self._end.startswith(shown):
            return False
        self._step = self._text
        return True


class BareParser(_Parser):
    """Calls are the whole answer, with nothing before them, so only an object that names one of the
    functions and has arguments is taken for one. ``;`` or white space divides several."""

    def __init__(self, names: Collection[str], tag: str = "") -> None:
        super().__init__(self._open)
        self._names, self._tag = names, tag

    def close(self) -> list[Piece]:
        return self._close(self._buffer, _SPACE + ";")

    def _open(self, pieces: list[Piece]) -> bool:
        shown = self._buffer.lstrip(_SPACE + ";" if self._index else _SPACE)
        if not self._index and self._tag:
            if shown != self._tag and self._tag.startswith(shown):
                return False
            shown = shown.removeprefix(self._tag).lstrip(_SPACE)
        if not shown:
            return False
        if shown[0] != "{":
            self._step = self._text
            return True
        lead = self._buffer[: len(self._buffer) - len(shown)]
        self._reader = CallsReader(self._index, self._names, True, lead=lead)
        self._buffer, self._step = shown, self._calls
        return True

    def _calls(self, pieces: list[Piece]) -> bool:
        return self._read(pieces, done=self._open, broken=self._text)

    def _text(self, pieces: list[Piece]) -> bool:
        if self._buffer:
            pieces.append(Text(self._buffer))
        self._buffer = ""
        return False


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
