"""Writes log lines, for people or for machines; knows nothing of HTTP, and never sees prompt text.

A line is a message and fields. Fields travel in the record's ``fields`` attribute, so that one call
serves both formats: ``log.info("request", extra={"fields": {...}})``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO


def configure_logs(
    log_format: str, stream: TextIO | None = None, level: int = logging.INFO
) -> None:
    """Send radixkv's log lines to ``stream`` in ``log_format`` (``text`` or ``json``).

    None: to what ``sys.stderr`` is when a line is written. It may be another by then than now, and
    that of now closed, as where a command runs inside of somebody else's process.
    """
    handler = _ToStderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logger = logging.getLogger("radixkv")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to ``sys.stderr`` as it is at each line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("it is always sys.stderr")


class TextLines(logging.Formatter):
    """``12:03:04.512 INFO  request id=... status=200 ttft=0.12s``"""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record on one line, a traceback below it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"
        words = [head] + [f"{k}={_word(v)}" for k, v in _fields(record).items() if v is not None]
        if record.exc_info:
            words.append("\n" + self.formatException(record.exc_info))
        return " ".join(words)


class JsonLines(logging.Formatter):
    """One JSON object a line, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record as one JSON object."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in _fields(record).items() if v is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _word(value: object) -> str:
    """Keep a value on its line: a caller's path or id must not forge a second line."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)
