"""Reads a call written as its name and then the arguments, as the text comes in pieces.

Knows ``name{...}`` with ``[ARGS]`` or ``[CALL_ID]id`` in between; nothing of what stands around.
"""

from __future__ import annotations

import re
from typing import Literal

from radixkv.service.tools_json import ObjectReader, parsed_object
from radixkv.service.tools_pieces import CallArguments, CallEnd, CallStart, Piece

_SPACE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_HEAD = 256
"""Characters between a marker and the arguments, in which a name and an id must be."""


class NamedReader:
    """One call. Until its name is known nothing is said, and it may still be text."""

    def __init__(self, index: int, lead: str) -> None:
        self.index = index
        self.state: Literal["open", "done", "broken"] = "open"
        self._head = lead
        self._lead = len(lead)
        self._arguments: ObjectReader | None = None

    @property
    def held(self) -> str:
        """What was taken and not said: text, if it turns out to be no call."""
        return self._head if self._arguments is None else ""

    def push(self, text: str, pieces: list[Piece]) -> int:
        """Take ``text`` up to the call's end or fault, say what can be said, and return how much
        was taken."""
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
        """End it: nothing more comes. Says so if its name was said."""
        if self._arguments is not None:
            raw = self._head + self._arguments.text
            pieces.append(CallEnd(self.index, self.state == "done", raw))

    def _name(self) -> str | None:
        head = self._head[self._lead :].removesuffix("[ARGS]")
        name = head.partition("[CALL_ID]")[0].strip(_SPACE)
        return name if _NAME.fullmatch(name) else None
