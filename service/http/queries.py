"""Reads query strings, or says in one sentence what is wrong with them; knows no route."""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web

from radixkv.errors import InvalidRequest

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)", re.ASCII)


def check_names(request: web.Request, known: Collection[str]) -> None:
    """Raise InvalidRequest for a parameter that the route does not know, or that comes twice."""
    for name in request.query:
        if name not in known:
            raise InvalidRequest(
                f"{name[:40]!r} is no parameter here; known: {', '.join(known) or 'none'}",
                param=name[:40],
            )
        if len(request.query.getall(name)) > 1:
            raise InvalidRequest(f"{name} is given twice", param=name)


def seconds(request: web.Request, name: str, *, most: float) -> float | None:
    """Read a time such as ``90s``, ``5m`` or ``1h``, or plain seconds; None if it is not given."""
    text = request.query.get(name)
    if text is None:
        return None
    match = _TIME.fullmatch(text)
    value = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 1 <= value <= most:
        raise InvalidRequest(
            f"{name} is {text[:40]!r}; wanted a time such as 90s, 5m or 1h, from 1s to "
            f"{most / 3600:g}h",
            param=name,
        )
    return value


def whole(request: web.Request, name: str, default: int, *, least: int, most: int) -> int:
    """Read a whole number."""
    text = request.query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise InvalidRequest(
            f"{name} is {text[:40]!r}; wanted a whole number from {least} to {most}", param=name
        )
    return int(text)


def flag(request: web.Request, name: str) -> bool:
    """Read ``true`` or ``false`` (also 1 or 0); false if it is not given."""
    text = request.query.get(name, "false")
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is {text[:40]!r}; wanted true or false", param=name)
    return text in ("true", "1")


def choice(request: web.Request, name: str, words: Collection[str]) -> str | None:
    """Read one of ``words``; None if it is not given."""
    text = request.query.get(name)
    if text is not None and text not in words:
        raise InvalidRequest(f"{name} is {text[:40]!r}; wanted {', '.join(words)}", param=name)
    return text
