"""Reads a file of batch requests line by line: JSON objects as OpenAI's Batch API defines them.

    {"custom_id": str, "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Knows lines, their places in the file and what is wrong with them; nothing of what a body means.
Holds one line at a time, whatever the file's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from radixkv.errors import InvalidRequest
from radixkv.service.http.body import parse_json

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETION_URL)
MAX_LINE_BYTES = 8 * 2**20
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file."""

    number: int
    """Counted from 1, empty lines included."""
    offset: int
    """Where it begins in the file, in bytes."""
    custom_id: str
    url: str
    body: dict[str, Any]


class LineFault(Exception):
    """A line is no request; ``code`` names the reason for programs."""

    def __init__(
        self, number: int, code: str, message: str, *, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.number, self.code, self.custom_id = number, code, custom_id


def read_lines(file: BinaryIO, *, limit: int = MAX_LINE_BYTES) -> Iterator[Line | LineFault]:
    """Yield each line that is not blank, or what is wrong with it, from the file's position on.

    A line of more than ``limit`` bytes is a fault, and is never held in memory whole.
    """
    number = 0
    while True:
        offset = file.tell()
        raw = file.readline(limit + 1)
        if not raw:
            return
        number += 1
        if len(raw) > limit:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(limit)
            yield LineFault(number, "line_too_long", f"the line has more than {limit} bytes")
        elif raw.strip():
            try:
                yield parse_line(raw, number, offset)
            except LineFault as fault:
                yield fault


def line_at(file: BinaryIO, number: int, offset: int) -> Line:
    """Read once more a line that ``read_lines`` yielded; raises LineFault if the file changed."""
    file.seek(offset)
    return parse_line(file.readline(MAX_LINE_BYTES + 1), number, offset)


def parse_line(raw: bytes, number: int, offset: int) -> Line:
    """Read one line; raises LineFault."""
    try:
        value = parse_json(raw)
    except InvalidRequest as e:
        message = str(e).replace("the body", "the line", 1)
        raise LineFault(number, "invalid_json_line", message) from None
    if not isinstance(value, dict):
        raise LineFault(number, "invalid_json_line", "the line is not a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise LineFault(
            number,
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters",
        )

    def fault(code: str, message: str) -> LineFault:
        return LineFault(number, code, message, custom_id=custom_id)

    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        raise fault("invalid_method", 'method must be "POST"')
    if url not in URLS:
        raise fault("invalid_url", f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise fault("invalid_body", "body must be a JSON object")
    return Line(number, offset, custom_id, url, body)


def count_lines(path: Path) -> int:
    """Count the lines of a file that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
