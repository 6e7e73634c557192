"""Says in one sentence what is wrong with a body: what pydantic found first, and at which place.

Knows pydantic's errors and plain JSON; nothing of what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from radixkv.errors import InvalidRequest

Steps: TypeAlias = "tuple[int | str, ...]"


def explain(error: ValidationError, at: str = "", body: Any = None) -> InvalidRequest:
    """Say what pydantic found first, with the path in the style ``messages[0].role``.

    ``at`` is the path of what was validated, if that was only a part of the body. With ``body``,
    what was validated, the branches of a union are told from its fields: then what is said is what
    the branch lacks that came furthest, and the path is one in the body.
    """
    found = error.errors(include_url=False, include_context=False)
    first, steps, wanted = found[0], found[0]["loc"], [_wanted(found[0])]
    if body is not None:
        first, steps, wanted = _furthest(found, body)
    path = at
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    if first["type"] == "union_tag_not_found":
        path += ".type"
    if first["type"] in ("missing", "union_tag_not_found"):
        problem = InvalidRequest(f"missing required parameter: '{path}'", param=path)
        problem.code = "missing_required_parameter"
        return problem
    if first["msg"].startswith(_SHOULD_BE):
        message = f"{path} is {_brief(first['input'])}; wanted {' or '.join(wanted)}"
    else:
        message = f"{path}: {wanted[0]}" if path else wanted[0]
    problem = InvalidRequest(message, param=path or None)
    problem.code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return problem


_SHOULD_BE = "Input should be "


def _wanted(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "dict_type"):
        return "an object"
    return error["msg"].removeprefix("Value error, ").removeprefix(_SHOULD_BE)


def _furthest(found: Sequence[ErrorDetails], body: Any) -> tuple[ErrorDetails, Steps, list[str]]:
    """Return of the branches that fail where the first one does what the furthest of them lacks, at
    which place of ``body``, and what all that fail there want."""
    places = [_place(error, body) for error in found]
    start = _common(places[0], found[0]["loc"])
    rivals = [i for i, error in enumerate(found) if error["loc"][: len(start)] == start]
    # Of those that came as far the one that is at least of the right type, or the first.
    best = max(rivals, key=lambda i: (len(places[i]), not found[i]["type"].endswith("_type")))
    alike = [i for i in rivals if places[i] == places[best] and _same_kind(found[i], found[best])]
    return found[best], places[best], [_wanted(found[i]) for i in alike]


def _same_kind(one: ErrorDetails, other: ErrorDetails) -> bool:
    """Tell whether both say only that the type is wrong, or are one."""
    return one is other or all(error["type"].endswith("_type") for error in (one, other))


def _common(place: Steps, loc: Steps) -> Steps:
    """Return the steps before the first branch of a union."""
    end = next((i for i, step in enumerate(place) if step != loc[i]), len(place))
    return place[:end]


def _place(error: ErrorDetails, body: Any) -> Steps:
    """Return the path to what is at fault, without the names of branches, which are in no body."""
    loc: Steps = error["loc"]
    more: Steps = ()
    if error["type"] == "missing":  # its last step is not there either
        loc, more = loc[:-1], loc[-1:]
    for place, value in _paths(loc, body):
        if value is error["input"]:
            return (*place, *more)
    return error["loc"]


def _paths(loc: Steps, value: Any) -> Iterator[tuple[Steps, Any]]:
    """Yield each way to read ``loc`` as steps and branches: a branch may be named like a field."""
    if not loc:
        yield (), value
        return
    step, rest = loc[0], loc[1:]
    below: Any
    if isinstance(step, int):
        is_there = isinstance(value, list) and step < len(value)
    else:
        is_there = isinstance(value, dict) and step in value
    if is_there:
        below = value[step]
        for place, found in _paths(rest, below):
            yield (step, *place), found
    if isinstance(step, str):
        yield from _paths(rest, value)


def _brief(value: object) -> str:
    """Show a small value as JSON; of anything else only its kind, for it may be the prompt."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:40]
    if isinstance(value, str) and len(value) <= 24:
        return json.dumps(value)
    return kind_of(value)


def kind_of(value: object) -> str:
    """Name what JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")
