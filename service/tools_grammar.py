"""The grammar of an answer that calls functions: forced to, or free to but in the right form.

Knows functions and the text around their calls; nothing of tokens but the ids of markers. JSON is
written as chat templates write it, with a space after commas and colons, so that a call that comes
back in a later prompt is the same tokens again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.tools_formats import ToolFormat

_AS_TEMPLATES_DO = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments; None: it takes none."""
    strict: bool = False
    """Refuse a schema that cannot be kept to the letter, and keep to it unforced."""
    at: str = "tools"
    """Where its schema stands in the body, for errors."""


def calls_grammar(
    how: ToolFormat,
    functions: Sequence[Function],
    *,
    special: Mapping[str, int],
    forced: bool,
    several: bool,
    only: Collection[str] | None = None,
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar of an answer that calls ``functions``, ``only`` those named if given.

    ``special``: ids of the markers that are special tokens. ``forced``: there is a call, and no
    text; else text may come too, or in its place what ``answer`` describes. ``several``: there may
    be more than one call. Raises InvalidRequest for a schema of no object.
    """
    rules = _Rules(special)
    called = [f for f in functions if only is None or f.name in only]
    free = not forced and answer is None
    # Where text may come before, that eats the marker of each call, or of their list.
    marker = how.marker if free and how.marker is not None else ""
    inner = "" if how.opening.startswith(marker) and how.opening else marker
    names = []
    for i, function in enumerate(called):
        before, after = how.around(function.name)
        before = before.removeprefix(inner)
        rules.add(
            f"call_{i}",
            f"{rules.literal(before)} arguments_{i} {rules.literal(after)}",
        )
        rules.add(f"arguments_{i}", "%json " + json.dumps(_schema(function)))
        names.append(f"call_{i}")
    rules.add("call", " | ".join(names))
    opening = how.opening.removeprefix(marker)
    more = f" ({rules.literal(how.between)} call)*" if several else ""
    calls = f"{rules.literal(opening)} call{more} {rules.literal(how.closing)}"
    if forced:
        rules.add("start", calls)
    elif answer is not None:
        rules.add("start", "calls | answer")
        rules.add("calls", calls)
        rules.add("answer", "%json " + _json_schema(how, answer))
    elif how.marker is None:
        rules.add("start", "TEXT | calls")
        rules.add("calls", calls)
        rules.add("TEXT", r"/(?s:\s*([^{\s].*)?)/")
    else:
        rules.before_marker(how.marker)
        if how.opening:
            rules.add("start", "TEXT | before calls")
            rules.add("calls", calls)
        else:
            rules.add("start", "(before call)* TEXT" if several else "TEXT | before call")
    return GrammarSpec.lark(rules.text())


class _Rules:
    """Collects the rules of a grammar; ``start`` comes first."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> None:
        """Add a rule, or a terminal if its name is in capitals."""
        self._rules[name] = body

    def literal(self, text: str) -> str:
        """Write ``text``, in which special tokens are tokens and not their names' letters."""
        if not text:
            return ""
        if not self._special:
            return _quoted(text)
        names = "|".join(map(re.escape, self._special))
        parts = [part for part in re.split(f"({names})", text) if part]
        return " ".join(
            f"<[{self._special[p]}]>" if p in self._special else _quoted(p) for p in parts
        )

    def before_marker(self, marker: str) -> None:
        """Add ``before``, text up to a marker and with it, and ``TEXT`` without one."""
        if marker in self._special:
            self.add("before", f"TEXT <[{self._special[marker]}]>")
            self.add("TEXT", "/(?s:.*)/")
            return
        found = re.escape(marker).replace("/", r"\/")
        self.add("before[lazy]", f"/(?s:.*){found}/")
        self.add("TEXT", f"/(?s:.*)/ & ~/(?s:.*){found}(?s:.*)/")

    def text(self) -> str:
        """Return the grammar."""
        names = sorted(self._rules, key=lambda name: name != "start")
        return "".join(f"{name}: {self._rules[name]}\n" for name in names)


def _schema(function: Function) -> dict[str, Any]:
    given = function.parameters
    schema = dict(given) if given is not None else {"properties": {}, "additionalProperties": False}
    kind = schema.setdefault("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"{function.at} describes no object: its type is {json.dumps(kind)[:40]}; arguments "
            "are one object",
            param=function.at,
        )
    schema["x-guidance"] = {**_AS_TEMPLATES_DO, "lenient": not function.strict}
    return schema


def _json_schema(how: ToolFormat, answer: GrammarSpec) -> str:
    if how.marker is None:
        raise InvalidRequest(
            "this model writes calls as plain JSON, so tools cannot go with an answer that "
            "must be JSON too: send tool_choice none or required",
            param="tools",
        )
    if answer.kind == "json_object":
        return '{"type": "object"}'
    if answer.kind == "json_schema" and isinstance(json.loads(answer.source), dict):
        return answer.source
    raise InvalidRequest(
        f"tools cannot be combined with a {answer.kind} that the answer must match; only JSON "
        "objects and schemas can, or tool_choice none",
        param="tools",
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
