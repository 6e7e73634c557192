"""Reads a request body into a model of it, or says in one sentence why it cannot.

Knows JSON and pydantic; nothing of what the fields mean.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from radixkv.errors import InvalidRequest
from radixkv.service.http.errors import HttpError
from radixkv.service.http.faults import explain, kind_of

Model = TypeVar("Model", bound=BaseModel)
Made = TypeVar("Made")
_READ_TIMEOUT_S = 60.0
# Validating a list of half a million token ids takes tens of milliseconds, which other streams
# would feel: such a body is parsed in a thread.
_INLINE_BYTES = 128 * 1024
MAX_NESTING = 64
"""Objects and arrays within each other; templates and digests walk what they are given."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: web.Request, model: type[Model]) -> Model:
    """Read and validate the JSON body of ``request``."""
    return await read_object(request, partial(validate, model=model))


async def read_object(request: web.Request, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Return what ``make`` makes of the JSON object that ``request`` brings."""
    if request.content_type != "application/json":
        # Also keeps web pages out: a browser sends this type across origins only after asking.
        raise HttpError(
            415,
            f"the body must be JSON with the header 'Content-Type: application/json', "
            f"not {request.content_type!r}",
        )
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            raw = await request.read()
    except web.RequestPayloadError:
        raise InvalidRequest("the body broke off, or is not encoded as its headers say") from None
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {_READ_TIMEOUT_S:.0f} s") from None
    if len(raw) <= _INLINE_BYTES:
        return make(_object(raw))
    return await asyncio.to_thread(lambda: make(_object(raw)))


def parse_body(raw: bytes, model: type[Model]) -> Model:
    """Validate ``raw`` as ``model``; raises InvalidRequest naming the first field at fault."""
    return validate(_object(raw), model)


def _object(raw: bytes) -> dict[str, Any]:
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind_of(value)}")
    return value


def validate(value: dict[str, Any], model: type[Model]) -> Model:
    """Validate an object as ``model``; raises InvalidRequest naming the first field at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise explain(e, body=value) from None


def parse_json(raw: bytes) -> Any:
    """Parse strict JSON: UTF-8, no NaN, no repeated names, no lone surrogates, not too deep."""
    try:
        value = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_no_repeats
        )
        if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:  # else it cannot be too deep
            _check_nesting(value)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"the body is not UTF-8 (byte {e.start})") from None
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the body escapes half of a surrogate pair (\\ud800-\\udfff)"
        ) from None
    except json.JSONDecodeError as e:
        raise InvalidRequest(
            f"the body is not JSON: {e.msg} (line {e.lineno}, column {e.colno})"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as e:
        raise InvalidRequest(f"the body is not JSON that we accept: {e}") from None
    return value


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            raise RecursionError
        level = [x for item in level for x in (item.values() if type(item) is dict else item)]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:80]!r} appears twice in one object")
    return found
