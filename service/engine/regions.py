"""Which part of a chat a place in its rendered text belongs to, whatever the template does.

Knows messages and text; nothing of tokens or caches. A template may put, trim or leave out what it
likes, so nothing is parsed: the chat is rendered again with one message's content replaced, and
where that begins to differ is where that content begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.errors import InvalidRequest

Kind = Literal["tools", "system", "message", "role_header", "generation_prompt", "prompt"]
Messages = Sequence[Mapping[str, Any]]
_MARKS = ("\ue000", "\ue001")  # of the private use area; no content begins with both


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a prompt. ``role_header`` is what the template writes before a content."""

    kind: Kind
    message: int | None = None
    role: str | None = None

    def __str__(self) -> str:
        if self.kind == "message":
            return f"message {self.message} ({self.role})"
        if self.kind == "role_header":
            return f"role header of message {self.message} ({self.role})"
        return self.kind.replace("_", " ")


PROMPT = Region("prompt")
"""All of a prompt that is no chat."""


def region_at(
    at: int,
    text: str,
    messages: Messages,
    render: Callable[[Messages], str],
    render_without_tools: Callable[[], str] | None = None,
) -> Region:
    """Return what character ``at`` of ``text`` belongs to; ``text == render(messages)``.

    ``render_without_tools`` is given where there are tools. O(log(messages)) renderings.
    """
    if render_without_tools is not None and _is_in_tools(at, text, render_without_tools):
        return Region("tools")
    first = _last_begun(at, text, messages, render)
    if first is None:
        return _header(messages, 0)
    index, start = first
    content = _content_of(messages[index])
    end = _end_of(content, text, start)
    if (
        end is None
        or at < end
        or (messages[index].get("tool_calls") and at < _calls_end(index, text, messages, render))
    ):
        role = str(messages[index].get("role"))
        if role in ("system", "developer"):
            return Region("system", index, role)
        return Region("message", index, role)
    if index + 1 == len(messages):
        return Region("generation_prompt")
    return _header(messages, index + 1)


def common_chars(a: str, b: str) -> int:
    """Return the length of the longest common prefix, by halving: each step is one memcmp."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _change(text: str, other: str) -> tuple[int, int]:
    """Return where what ``text`` alone has begins and ends: around it both are the same."""
    start = common_chars(text, other)
    return start, len(text) - common_chars(text[start:][::-1], other[start:][::-1])


def _header(messages: Messages, index: int) -> Region:
    return Region("role_header", index, str(messages[index].get("role")))


def _is_in_tools(at: int, text: str, render_without_tools: Callable[[], str]) -> bool:
    try:
        without = render_without_tools()
    except InvalidRequest:
        return False
    start, end = _change(text, without)
    return start <= at < end


def _last_begun(
    at: int, text: str, messages: Messages, render: Callable[[Messages], str]
) -> tuple[int, int] | None:
    """Return the last message whose content begins at or before ``at``, and where it does."""
    found: tuple[int, int] | None = None
    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        start = _start_of(middle, text, messages, render)
        if start is not None and start <= at:
            found, low = (middle, start), middle + 1
        else:
            high = middle
    return found


def _start_of(
    index: int, text: str, messages: Messages, render: Callable[[Messages], str]
) -> int | None:
    """Return where the content of a message begins; None if the template will not show it."""
    message = messages[index]
    mark = _MARKS[_content_of(message).lstrip().startswith(_MARKS[0])]
    changed = [*messages]
    changed[index] = {**message, "content": mark}
    try:
        other = render(changed)
    except InvalidRequest:
        return None
    start = common_chars(text, other)
    return None if start == len(text) == len(other) else start


def _calls_end(index: int, text: str, messages: Messages, render: Callable[[Messages], str]) -> int:
    """Return where the calls of a message end: what follows is there without them too."""
    changed = [*messages]
    changed[index] = {**messages[index], "tool_calls": []}
    try:
        without = render(changed)
    except InvalidRequest:
        return 0
    return _change(text, without)[1]


def _content_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _end_of(content: str, text: str, start: int) -> int | None:
    """Return where the content ends that begins at ``start``; None if it was written otherwise."""
    for shown in (content, content.strip(), content.rstrip(), content.lstrip()):
        if text.startswith(shown, start):
            return start + len(shown)
    return None
