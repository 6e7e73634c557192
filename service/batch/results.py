"""The files that a batch writes: one line for each request, each exactly once, whatever happens.

Knows JSON lines and the disk; nothing of engines. A line is written whole and never changed. What
was not on disk when the process died is computed again; a last line that was cut off is removed.

    an answer          {"id", "custom_id", "response": {"status_code": 200, "request_id", "body"},
                        "error": null}
    a refusal          the same with the status and the error body that HTTP would have answered
    a line that is     {"id", "custom_id" or null, "response": null,
    no request          "error": {"code", "message", "line"}}
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

from radixkv.errors import InvalidConfig
from radixkv.service.batch.lines import LineFault
from radixkv.service.http.errors import describe, log_bug


@dataclass(slots=True)
class Spent:
    """Tokens of prompts, those of them that were cached, and of answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, body: Any) -> None:
        """Add the usage that an answer's body tells; nothing if it tells none."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt += int(usage.get("prompt_tokens") or 0)
            self.completion += int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached += int(details.get("cached_tokens") or 0)


class Done:
    """Which lines have been answered, and the tokens of those. About a hundred bytes a line."""

    def __init__(self) -> None:
        self.spent = Spent()
        """Of the answers that were added."""
        self._ids: set[bytes] = set()
        self._faults: set[int] = set()

    def add(self, record: dict[str, Any]) -> None:
        """Note a line of an output or error file."""
        error = record.get("error")
        if isinstance(error, dict) and isinstance(error.get("line"), int):
            self._faults.add(error["line"])
        elif isinstance(record.get("custom_id"), str):
            self._ids.add(digest(record["custom_id"]))
        if is_answer(record):
            self.spent.add(record["response"]["body"])

    def has(self, custom_id: str) -> bool:
        """Whether the request of that name was answered."""
        return digest(custom_id) in self._ids

    def has_fault(self, number: int) -> bool:
        """Whether it was said that line ``number`` is no request."""
        return number in self._faults


class ResultFile:
    """Appends lines to one file; a context manager. For one writer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write these lines and wait until the disk has them."""
        if not records:
            return
        self._file.write(
            b"".join(
                json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records
            )
        )
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def recover(path: Path, done: Done) -> tuple[int, int]:
    """Read what a run before wrote, cut off a last line that is not whole; (answers, errors).

    Raises InvalidConfig if the file holds something else: then nothing is changed.
    """
    answers = errors = 0
    try:
        with path.open("rb") as file:
            end = 0
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                try:
                    record = json.loads(raw)
                    if not isinstance(record, dict) or "custom_id" not in record:
                        raise ValueError("no batch output")
                except ValueError:
                    raise InvalidConfig(
                        f"{path} is no output of a batch (byte {end}); it is left as it is"
                    ) from None
                end += len(raw)
                done.add(record)
                if is_answer(record):
                    answers += 1
                else:
                    errors += 1
    except FileNotFoundError:
        return 0, 0
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return answers, errors


def is_answer(record: dict[str, Any]) -> bool:
    """Whether a line of output says what was asked for."""
    response = record.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def response_record(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    """Build the line for a request that was answered or refused."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"req-{uuid.uuid4().hex}",
            "body": body,
        },
        "error": None,
    }


def error_record(custom_id: str, error: Exception) -> dict[str, Any]:
    """Build the line for a request that failed, as HTTP would have answered."""
    status, body, _ = describe(error, custom_id)
    if status == 500:
        log_bug(custom_id)
    return response_record(custom_id, status, body)


def fault_record(fault: LineFault) -> dict[str, Any]:
    """Build the line for what is no request."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": fault.custom_id,
        "response": None,
        "error": {"code": fault.code, "message": str(fault), "line": fault.number},
    }


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that stand for a name."""
    return blake2b(custom_id.encode(), digest_size=16).digest()
