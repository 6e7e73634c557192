"""The ways in which families of models write calls, and which of them a chat template means.

Knows markers, and the text around a call's name and arguments; nothing of tokens or clients.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from radixkv.service.tools_parsing import BareParser, MarkedParser, ToolParser

FormatName = Literal["hermes", "llama3_json", "mistral"]
FORMATS: tuple[FormatName, ...] = ("hermes", "llama3_json", "mistral")
_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"


class ToolFormat(Protocol):
    """One way to write calls."""

    @property
    def name(self) -> FormatName:
        """By which it is asked for."""
        ...

    @property
    def special(self) -> frozenset[str]:
        """Special tokens that must show in an answer's text for calls to be found."""
        ...

    @property
    def marker(self) -> str | None:
        """What every call begins with, wherever in an answer; None: calls are the whole answer."""
        ...

    @property
    def opening(self) -> str:
        """What comes before the first call."""
        ...

    @property
    def between(self) -> str:
        """What comes between two calls."""
        ...

    @property
    def closing(self) -> str:
        """What comes after the last call."""
        ...

    @property
    def single(self) -> bool:
        """Whether a template shows one call an answer at most, so that two could not come back."""
        ...

    def around(self, name: str) -> tuple[str, str]:
        """Return what a call of ``name`` has before its arguments, and after them."""
        ...

    def parser(self, names: Collection[str]) -> ToolParser:
        """Return what reads one answer; ``names``: the functions there are."""
        ...


@dataclass(frozen=True, slots=True)
class Hermes:
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``: Hermes 2, Qwen 2.5 and 3."""

    name: FormatName = "hermes"
    special: frozenset[str] = frozenset({_BEGIN, _END})
    marker: str | None = _BEGIN
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    single: bool = False

    def around(self, name: str) -> tuple[str, str]:
        """As Qwen's templates write it."""
        return f'{_BEGIN}\n{{"name": {_quoted(name)}, "arguments": ', f"}}\n{_END}"

    def parser(self, names: Collection[str]) -> ToolParser:
        """A name that no function has is a call too: who runs it can say so to the model."""
        return MarkedParser(_BEGIN, _END)


@dataclass(frozen=True, slots=True)
class Llama3:
    """``{"name": ..., "parameters": ...}`` and nothing else: Llama 3.1 to 3.3."""

    single: bool = False
    name: FormatName = "llama3_json"
    special: frozenset[str] = frozenset({_TAG})
    marker: str | None = None
    opening: str = ""
    between: str = "; "
    closing: str = ""

    def around(self, name: str) -> tuple[str, str]:
        """As Llama's template writes it."""
        return f'{{"name": {_quoted(name)}, "parameters": ', "}"

    def parser(self, names: Collection[str]) -> ToolParser:
        """Only a function that there is counts: any other object is an answer in JSON."""
        return BareParser(frozenset(names), _TAG)


@dataclass(frozen=True, slots=True)
class Mistral:
    """``[TOOL_CALLS]`` and a list, or (``named``) ``[TOOL_CALLS]name[ARGS]{...}``."""

    named: bool = False
    spaced: bool = False
    """Whether the template writes a space before the list."""
    name: FormatName = "mistral"
    special: frozenset[str] = frozenset({_CALLS, "[ARGS]", "[CALL_ID]"})
    marker: str | None = _CALLS
    single: bool = False

    @property
    def opening(self) -> str:
        """Of a list."""
        return "" if self.named else f"{_CALLS} [" if self.spaced else f"{_CALLS}["

    @property
    def between(self) -> str:
        """Of a list."""
        return "" if self.named else ", "

    @property
    def closing(self) -> str:
        """Of a list."""
        return "" if self.named else "]"

    def around(self, name: str) -> tuple[str, str]:
        """As the newer or the older templates write it."""
        if self.named:
            return f"{_CALLS}{name}[ARGS]", ""
        return f'{{"name": {_quoted(name)}, "arguments": ', "}"

    def parser(self, names: Collection[str]) -> ToolParser:
        """Reads all of Mistral's forms."""
        return MarkedParser(_CALLS, named=True)


def format_of(template: str | None, asked: str = "auto") -> ToolFormat | None:
    """Return how a model writes calls whose chat template is ``template``; None: nobody knows.

    ``asked`` is one of FORMATS, or ``auto`` to tell by the markers in the template.
    """
    text = template or ""
    name = asked if asked != "auto" else _told_by(text)
    if name == "hermes":
        return Hermes()
    if name == "llama3_json":
        return Llama3(single="single tool-calls" in text)
    if name == "mistral":
        spaced = f"{_CALLS} [" in text and f"{_CALLS}[" not in text
        return Mistral(named="[ARGS]" in text, spaced=spaced)
    return None


def _told_by(template: str) -> FormatName | None:
    if "<function=" in template:
        return None  # Qwen 3 Coder's: <tool_call> there holds no JSON
    if _BEGIN in template:
        return "hermes"
    if _CALLS in template:
        return "mistral"
    if '"parameters": ' in template and ("ipython" in template or _TAG in template):
        return "llama3_json"
    return None


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
