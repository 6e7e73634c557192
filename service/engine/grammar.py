"""What an answer must look like, as its caller says it; knows no tokens, no masks and no library.

A spec is text: it can be compared, hashed, logged and kept. What it means for a model's tokens is
grammar_compile.py's affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from radixkv.errors import InvalidRequest

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]
MAX_SOURCE_CHARS = 128 * 1024
"""Of a schema, pattern, list or grammar."""
MAX_CHOICES_LISTED = 4096
MAX_WORD_CHARS = 8192
"""Of a pattern, an option, or one string in a schema: what is made of it costs its square."""
MAX_NESTING = 64
"""Levels of objects and arrays in the text of a schema. ``$ref`` may still recurse."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One of five ways to say what a choice's text must be. Raises InvalidRequest.

    Only cheap checks are made here; the rest when a model's tokens are known (``Grammars``). Each
    has a constructor of its name, and each is a keyword where an Engine is asked:
    ``engine.generate(prompt, json_schema=...)``.
    """

    kind: GrammarKind
    source: str = ""
    """``json_object``: nothing; ``json_schema``: the schema's JSON; ``regex``: the pattern, which
    all of the text must match; ``choice``: a JSON list of strings; ``lark``: a grammar in
    llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            known = ", ".join(get_args(GrammarKind))
            raise InvalidRequest(f"grammar kind is {self.kind!r}; wanted one of {known}")
        if not isinstance(self.source, str):
            raise InvalidRequest(f"{self.kind} is {self.source!r:.100}; wanted text")
        most = MAX_WORD_CHARS if self.kind == "regex" else MAX_SOURCE_CHARS
        if len(self.source) > most:
            raise InvalidRequest(
                f"{self.kind} has {len(self.source)} characters; at most {most} are accepted"
            )
        if not self.source and self.kind != "json_object":
            raise InvalidRequest(f"{self.kind} is empty")
        if self.kind == "json_schema":
            schema = _parsed(self.kind, self.source)
            if not isinstance(schema, (dict, bool)):
                raise InvalidRequest("json_schema is no schema; wanted a JSON object")
            _check_schema(schema)
        if self.kind == "choice":
            _check_choices(_parsed(self.kind, self.source))

    @classmethod
    def json_object(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """JSON that is valid under ``schema``: a mapping, its text, or a model of pydantic's."""
        describe = getattr(schema, "model_json_schema", None)
        if isinstance(schema, type) and describe is not None:
            schema = describe()
        return cls("json_schema", schema if isinstance(schema, str) else _dumped(schema))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that ``pattern`` matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """One of ``options``, to the letter."""
        # The letters of a string would be the options.
        if isinstance(options, str) or not isinstance(options, Iterable):
            raise InvalidRequest("choice is no list of strings")
        return cls("choice", _dumped(list(options)))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """Text of a grammar in llguidance's Lark, whose first rule is ``start``."""
        return cls("lark", grammar)


def take_grammar(given: MutableMapping[str, Any]) -> GrammarSpec | None:
    """Build a spec from those keywords in ``given`` that are kinds of one, and remove them.

    ``json_object`` is True or False. Raises InvalidRequest if there are two, ``grammar`` counted.
    """
    found: dict[str, GrammarSpec] = {}
    for kind in get_args(GrammarKind):
        value = given.pop(kind, None)
        if value is not None and value is not False:
            make = getattr(GrammarSpec, kind)
            found[kind] = make() if kind == "json_object" else make(value)
    if given.get("grammar") is not None:
        found["grammar"] = given["grammar"]
    if len(found) > 1:
        names = list(found)
        raise InvalidRequest(f"{' and '.join(names)} are given; wanted one of them", param=names[0])
    return next(iter(found.values()), None)


def _dumped(value: object) -> str:
    # Key order is kept: it is the order in which an object's members are generated.
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRequest(f"what the answer must look like is no JSON: {e}") from e


def _parsed(kind: str, source: str) -> object:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"{kind} is no JSON: {e}") from e


def _check_choices(options: object) -> None:
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise InvalidRequest("choice is no list of strings")
    if not options or not all(options):
        raise InvalidRequest("choice has no options, or an empty one")
    if any(len(option) > MAX_WORD_CHARS for option in options):
        raise InvalidRequest(f"choice has an option of more than {MAX_WORD_CHARS} characters")
    if len(options) > MAX_CHOICES_LISTED:
        raise InvalidRequest(
            f"choice has {len(options)} options; at most {MAX_CHOICES_LISTED} are accepted"
        )


def _check_schema(schema: object) -> None:
    """Refuse what is nested too deeply or has too long a string."""
    level, depth = [schema], 0
    while level:
        if depth > MAX_NESTING:
            raise InvalidRequest(f"json_schema is nested more than {MAX_NESTING} levels deep")
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str) and len(item) > MAX_WORD_CHARS:
                raise InvalidRequest(
                    f"json_schema has a string of {len(item)} characters; at most "
                    f"{MAX_WORD_CHARS} are accepted"
                )
        level, depth = below, depth + 1
