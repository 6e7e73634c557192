"""A server whose answers are given: everything around the model is real, what it says is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from radixkv.service.engine.params import Choice, Delta, FinishReason, Usage
from radixkv.service.engine.stream import Outbox, Stream
from tests.http_server import RunningServer


@contextmanager
def saying(
    server: RunningServer,
    pieces: Sequence[str],
    finish: FinishReason = "stop",
    stop_reason: str | None = None,
) -> Iterator[list[Any]]:
    """Let the engine answer each request with ``pieces``; yields the parameters it was asked with.

    All choices say the same.
    """
    engine, asked = server.engine, []
    submit = engine.submit

    def answer(prompt: Sequence[int], params: Any, **kwargs: Any) -> Stream:
        asked.append(params)
        stream = Stream(
            kwargs["request_id"], prompt, params.n, abort=lambda _: None, done=lambda _: None
        )
        stream.usage = Usage(len(prompt), len(pieces), 0)
        outbox = Outbox()
        for index in range(params.n):
            for i, piece in enumerate(pieces):
                outbox.put(stream, Delta(index, piece, (i,)))
            outbox.put(stream, Delta(index, "", (), None, finish, stop_reason))
            stream._choices[index] = Choice(
                index, "".join(pieces), tuple(range(len(pieces))), finish, stop_reason
            )
        stream._finish()
        return stream

    engine.submit = answer  # type: ignore[method-assign, assignment]
    try:
        yield asked
    finally:
        engine.submit = submit  # type: ignore[method-assign]
