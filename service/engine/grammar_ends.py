"""Say whether what follows a schema or a grammar can ever end; knows references, not tokens.

A tree whose nodes must each have a child goes on for ever: none of its tokens is ever the last, and
the answer would be cut at its limit. Only what surely cannot end is told; what is not understood
here may.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Ref:
    """Whatever another rule needs."""

    rule: Hashable


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of these; nothing, if there are none."""

    parts: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these."""

    parts: tuple[Need, ...]


Need = Ref | AllOf | OneOf
"""What must be able to end so that something can."""
NOTHING = AllOf(())


def can_end(rules: Mapping[Hashable, Need], start: Hashable) -> bool:
    """Whether ``start`` can end: the least set of rules that can. A rule that is missing can."""
    waiting: dict[Hashable, set[Hashable]] = {}
    for name, need in rules.items():
        for rule in _refs(need):
            waiting.setdefault(rule, set()).add(name)
    ending = {rule for rule in waiting if rule not in rules}
    ready = list(rules)
    while ready:
        name = ready.pop()
        if name not in ending and _met(rules[name], ending):
            ending.add(name)
            ready.extend(waiting.get(name, ()))
    return start in ending or start not in rules


def schema_can_end(source: str) -> bool:
    """Whether JSON that is valid under the schema ``source`` can be finite."""
    if source.count('"$id"') > 1:  # what a reference means then depends on where it stands
        return True
    try:
        return can_end(schema_rules(json.loads(source)), "#")
    except RecursionError:  # deeper than llguidance reads
        return True


def schema_rules(schema: Any) -> dict[Hashable, Need]:
    """Return what the schema needs, as the rule ``#``, and what each reference in it does."""
    rules: dict[Hashable, Need] = {}
    wanted: list[Hashable] = ["#"]
    while wanted:
        name = wanted.pop()
        if name not in rules:
            rules[name] = need = _of_schema(_resolved(schema, str(name)))
            wanted.extend(_refs(need))
    return rules


def _of_schema(schema: Any) -> Need:
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return NOTHING
    parts: list[Need] = []
    if isinstance(ref := schema.get("$ref"), str):
        parts.append(Ref(ref))
    if isinstance(every := schema.get("allOf"), list):
        parts += map(_of_schema, every)
    for word in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(word), list):
            parts.append(OneOf(tuple(map(_of_schema, some))))
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    kinds = {"object": _of_object, "array": _of_array}
    if all(kind in kinds for kind in types):  # any other is a word, and words end
        parts.append(OneOf(tuple(kinds[kind](schema) for kind in types)))
    return AllOf(tuple(parts))


def _of_object(schema: dict[str, Any]) -> Need:
    members, required = schema.get("properties"), schema.get("required")
    others = schema.get("additionalProperties")
    if not isinstance(required, list) or "patternProperties" in schema:
        return NOTHING
    known = members if isinstance(members, dict) else {}
    return AllOf(tuple(_of_schema(known.get(name, others)) for name in required))


def _of_array(schema: dict[str, Any]) -> Need:
    least, first = schema.get("minItems"), schema.get("prefixItems")
    if not isinstance(least, int | float) or least < 1:
        return NOTHING
    first = first if isinstance(first, list) else []
    parts = [_of_schema(item) for item in first[: int(least)]]
    if least > len(first):
        parts.append(_of_schema(schema.get("items")))
    return AllOf(tuple(parts))


def _resolved(schema: Any, ref: str) -> Any:
    """Return what a JSON pointer points at; None, which may be anything, if that is not here."""
    if not ref.startswith("#/"):
        return schema if ref == "#" else None
    at = schema
    for step in unquote(ref[2:]).split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(step)
        elif isinstance(at, list) and step.isdigit() and int(step) < len(at):
            at = at[int(step)]
        else:
            return None
    return at


def _refs(need: Need) -> set[Hashable]:
    if isinstance(need, Ref):
        return {need.rule}
    return {rule for part in need.parts for rule in _refs(part)}


def _met(need: Need, ending: set[Hashable]) -> bool:
    if isinstance(need, Ref):
        return need.rule in ending
    found = (_met(part, ending) for part in need.parts)
    return all(found) if isinstance(need, AllOf) else any(found)
