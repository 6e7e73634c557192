"""Calls and their results in a chat's history, as chat templates want to be shown them.

Knows messages in OpenAI's shape; nothing of tokens, and nothing of who sends them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.service.tools_json import parsed_object

_SHORT = 9


def shown_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as templates read it: its arguments as the object that their JSON means.

    Arguments that are no JSON object, as a call that was cut off has, stay the text they are.
    """
    function = {"name": name, "arguments": _as_object(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with the arguments of their calls as objects, where they are text."""
    found = []
    for message in messages:
        changed = dict(message)
        if calls := changed.get("tool_calls"):
            changed["tool_calls"] = [_with_object(call) for call in calls]
        found.append(changed)
    return found


def shorten_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with ids of calls of nine letters and digits, which Mistral's templates
    insist on. The same id always becomes the same; one that fits stays."""
    found = []
    for message in messages:
        changed = dict(message)
        if isinstance(changed.get("tool_call_id"), str):
            changed["tool_call_id"] = _short(changed["tool_call_id"])
        if changed.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": _short(str(call.get("id", "")))} for call in changed["tool_calls"]
            ]
        found.append(changed)
    return found


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    called = call.get("function") or {}
    if not isinstance(called.get("arguments"), str):
        return call
    return {**call, "function": {**called, "arguments": _as_object(called["arguments"])}}


def _as_object(arguments: str) -> object:
    parsed = parsed_object(arguments or "{}")
    return arguments if parsed is None else parsed


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:_SHORT]
