"""An answer's pieces as the content blocks of Anthropic's event stream: begun, filled and ended.

Knows one answer; nothing of requests, usage or how it all ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from radixkv.service.http.anthropic_replies import BlockReply, MessageEvent
from radixkv.service.tools_pieces import CallArguments, CallEnd, CallStart, Piece, Text


def call_id() -> str:
    """Return a new id of a call."""
    return f"toolu_{uuid.uuid4().hex[:24]}"


class Blocks:
    """The blocks of one answer; at most one of them is open, and they are numbered in order."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def open_text(self) -> list[MessageEvent]:
        """Begin a block of text."""
        return self._begin({"type": "text", "text": ""})

    def add(self, pieces: Iterable[Piece]) -> list[MessageEvent]:
        """Return the events of more pieces."""
        events: list[MessageEvent] = []
        for piece in pieces:
            events += self._add(piece)
        return events

    def close(self) -> list[MessageEvent]:
        """End the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _add(self, piece: Piece) -> list[MessageEvent]:
        match piece:
            case Text(text):
                begun = [] if self._open == "text" else self.open_text()
                return [
                    *begun,
                    {
                        "type": "content_block_delta",
                        "index": self._index,
                        "delta": {"type": "text_delta", "text": text},
                    },
                ]
            case CallStart(_, name):
                return self._begin({"type": "tool_use", "id": call_id(), "name": name, "input": {}})
            case CallArguments(_, text):
                return [
                    {
                        "type": "content_block_delta",
                        "index": self._index,
                        "delta": {"type": "input_json_delta", "partial_json": text},
                    }
                ]
            case CallEnd():
                return self.close()

    def _begin(self, block: BlockReply) -> list[MessageEvent]:
        ended = self.close()
        self._index += 1
        self._open = block["type"]
        return [
            *ended,
            {"type": "content_block_start", "index": self._index, "content_block": block},
        ]
