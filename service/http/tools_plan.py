"""What tools make of one request: the grammar that its answer keeps to, and what reads the answer.

Knows what a request wants and how the model writes calls; nothing of how a client is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.prompting import Prompting
from radixkv.service.http.tools_schema import Calling
from radixkv.service.tools_formats import FORMATS, ToolFormat
from radixkv.service.tools_grammar import calls_grammar
from radixkv.service.tools_parsing import ToolParser
from radixkv.service.tools_pieces import Answer, Piece, Text, joined


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the answers of one request are read."""

    how: ToolFormat | None = None
    """None: an answer is text, whatever it looks like."""
    names: tuple[str, ...] = ()
    several: bool = True

    def reader(self) -> AnswerReader:
        """Return what reads one answer, from its beginning."""
        return AnswerReader(
            None if self.how is None else self.how.parser(self.names), several=self.several
        )

    def answer(self, text: str) -> Answer:
        """Read a whole answer."""
        reader = self.reader()
        return joined([*reader.push(text), *reader.close()])


class AnswerReader:
    """Reads one answer as it comes: into text and calls."""

    def __init__(self, parser: ToolParser | None, *, several: bool) -> None:
        self._parser, self._several = parser, several
        self.calls = 0
        """Complete calls so far."""

    def push(self, text: str) -> list[Piece]:
        """Take more text."""
        if self._parser is None:
            return [Text(text)] if text else []
        return list(self._kept(self._parser.push(text) if text else []))

    def close(self) -> list[Piece]:
        """Return what is left at the end."""
        return list(self._kept(self._parser.close())) if self._parser is not None else []

    def _kept(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Leave out calls after the first, where one was asked for."""
        for piece in pieces:
            index = getattr(piece, "index", 0)
            if index == 0 or self._several:
                self.calls += getattr(piece, "whole", False)
                yield piece


def plan_tools(
    prompting: Prompting, calling: Calling, params: SamplingParams
) -> tuple[ToolPlan, SamplingParams]:
    """Return how to read answers, and ``params`` with the grammar that calls must keep to.

    Raises InvalidRequest if nobody knows how this model writes calls, or what is asked for cannot
    be had together.
    """
    if not calling.functions or calling.mode == "none":
        return ToolPlan(), params
    prompting.expect_tools()
    how = prompting.tool_format
    if how is None:
        raise InvalidRequest(
            "this server cannot tell by the chat template how its model writes calls of functions; "
            f"start it with --tool-call-parser and one of {', '.join(FORMATS)}, or send "
            'tool_choice: "none"',
            param="tools",
        )
    several = calling.several and not how.single
    plan = ToolPlan(how, tuple(f.name for f in calling.functions), several)
    forced = calling.mode == "required"
    strict = any(function.strict for function in calling.functions)
    answer = None if forced else params.grammar
    if not (forced or strict or calling.only is not None or answer is not None):
        return plan, params
    grammar = calls_grammar(
        how,
        calling.functions,
        special=prompting.special_ids(how.special),
        forced=forced,
        several=several,
        only=calling.only,
        answer=answer,
    )
    return plan, replace(params, grammar=grammar)
