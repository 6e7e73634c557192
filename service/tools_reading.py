"""Reads calls written as JSON, one object or a list of them, as the text comes in pieces.

Knows ``{"name": ..., "arguments": {...}}`` with ``parameters`` for the latter too, keys in any
order; nothing of what stands around it. A name is said when it is known, arguments as they come.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from radixkv.service.tools_json import ObjectReader, Span, parsed_object
from radixkv.service.tools_pieces import CallArguments, CallEnd, CallStart, Piece

_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class CallReader:
    """One call. Until ``started`` nothing is said, and a broken call may still be text."""

    index: int
    names: Collection[str] | None = None
    """Functions that may be called; None: any name counts."""
    needs_arguments: bool = False
    """Whether an object without arguments is no call."""
    lead: str = ""
    """What stood before the object and belongs to the call."""
    started: bool = False
    ended: bool = False
    _object: ObjectReader = field(default_factory=ObjectReader)
    _seen: int = 0
    """Members of the object that were looked at to their end."""
    _name: str | None = None
    _arguments: Span | None = None
    _said: int = 0
    """Where in the object's text the arguments that are not said yet begin."""
    _whole: str | None = None
    """Arguments that are said at once: those given as a string, or null."""
    _no_call: bool = False

    @property
    def state(self) -> Literal["open", "done", "broken"]:
        """Whether the call goes on, is complete, or is none."""
        return "broken" if self._no_call else self._object.state

    @property
    def raw(self) -> str:
        """What was taken so far."""
        return self.lead + self._object.text

    def push(self, text: str, pieces: list[Piece]) -> int:
        """Take ``text`` up to the call's end or fault, and say what can be said.

        Returns how much was taken.
        """
        taken = self._object.push(text)
        try:
            self._look()
        except ValueError:
            self._no_call = True
        if not self._no_call:
            pieces.extend(self._say())
        if self.state != "open":
            self.end(pieces)
        return taken

    def end(self, pieces: list[Piece]) -> None:
        """End the call: nothing more comes. Says so if it was started."""
        if self.started and not self.ended:
            pieces.append(CallEnd(self.index, self.state == "done", self.raw))
        self.ended = True

    def _look(self) -> None:
        """Take note of members; ValueError where they make no call."""
        found = self._object.members
        while self._seen < len(found):
            member = found[self._seen]
            if member.key.end is None or member.value is None:
                return
            key, value = json.loads(self._object.span(member.key)), member.value
            if key in _ARGUMENTS and self._arguments is None:
                self._arguments, self._said = value, value.start
            if value.end is None:
                return
            shown = self._object.span(value)
            if key == "name":
                self._take_name(json.loads(shown))
            elif key in _ARGUMENTS:
                if self._arguments is not value:
                    raise ValueError("arguments are given twice")
                if not shown.startswith("{"):
                    self._whole = _unpacked(json.loads(shown))
                elif parsed_object(shown) is None:
                    raise ValueError("arguments are no object that can be written again")
            self._seen += 1
        if self._object.state == "done":
            if self._name is None or (self.needs_arguments and self._arguments is None):
                raise ValueError("no call")
            if self._arguments is None:
                self._whole = "{}"

    def _take_name(self, name: object) -> None:
        if self._name is not None or not isinstance(name, str) or not name:
            raise ValueError("no name")
        if self.names is not None and name not in self.names:
            raise ValueError("unknown name")
        self._name = name

    def _say(self) -> Iterator[Piece]:
        if self._name is None:
            return
        opened = self._arguments is not None and self._object.text.startswith(
            "{", self._arguments.start
        )
        if not self.started:
            if not opened and self._whole is None:
                return
            self.started = True
            yield CallStart(self.index, self._name)
        if self._whole is not None:
            yield CallArguments(self.index, self._whole)
            self._whole = None
        elif opened and self._arguments is not None:
            text = self._object.text[self._said : self._arguments.end]
            self._said += len(text)
            if text:
                yield CallArguments(self.index, text)


def _unpacked(value: object) -> str:
    """Return arguments that came as a string, or as null; ValueError for anything else."""
    if value is None or value == "":
        return "{}"
    if not isinstance(value, str):
        raise ValueError("arguments are no object")
    inner = ObjectReader()
    text = value.strip()
    if inner.push(text) != len(text) or inner.state != "done":
        raise ValueError("arguments are no object")
    return text


@dataclass(slots=True)
class CallsReader:
    """One call, or a list of calls in brackets. Numbers them from ``index`` on."""

    index: int
    names: Collection[str] | None = None
    needs_arguments: bool = False
    lead: str = ""
    """What stood before and belongs to the first call."""
    state: Literal["open", "done", "broken"] = "open"
    _listed: bool = False
    _call: CallReader | None = None
    _after: bool = False
    """Whether a call was read, so that a comma or a bracket comes next."""

    @property
    def held(self) -> str:
        """What was taken and not said: text, if it turns out to be no call."""
        if self._call is not None:
            return "" if self._call.started else self._call.raw
        return self.lead

    def push(self, text: str, pieces: list[Piece]) -> int:
        """As ``CallReader.push``; where it breaks, ``held`` is to be shown as text."""
        at = 0
        while at < len(text) and self.state == "open":
            if self._call is not None:
                at += self._call.push(text[at:], pieces)
                self._settle(self._call)
                continue
            char = text[at]
            if char in _SPACE:
                self.lead += char
            elif char == "{" and not self._after:
                self._call = CallReader(
                    self.index, self.names, self.needs_arguments, lead=self.lead
                )
                self.lead = ""
                continue
            elif char == "[" and not self._listed:
                self._listed = True
                self.lead += char
            elif self._listed and self._after and char == ",":
                self._after = False
                self.lead += char
            elif self._listed and self._after and char == "]":
                self.state, self.lead = "done", ""
            else:
                self.state = "broken"
                break
            at += 1
        return at

    def end(self, pieces: list[Piece]) -> None:
        """End it: nothing more comes."""
        if self._call is not None:
            self._call.end(pieces)
            if self._call.started:
                self.index += 1
        elif self._after:
            self.lead = ""  # a list that was not closed has lost nothing

    def _settle(self, call: CallReader) -> None:
        if call.state == "open":
            return
        self.index += call.started
        if call.state == "broken":
            self.state = "broken"
            return
        self._call, self._after = None, True
        if not self._listed:
            self.state = "done"
