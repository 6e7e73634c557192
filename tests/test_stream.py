"""Tokens reach their consumer, thread or coroutine, in order and without loss."""

from __future__ import annotations

import asyncio
import threading

import pytest

from radixkv.errors import EngineDead
from radixkv.service.engine.params import Choice, Delta
from radixkv.service.engine.stream import Outbox, Stream


def make(num_choices: int = 1) -> tuple[Stream, list[Stream]]:
    aborted: list[Stream] = []
    stream = Stream("r", [1, 2], num_choices, abort=aborted.append, done=lambda _: None)
    return stream, aborted


def feed(stream: Stream, texts: list[str]) -> None:
    outbox = Outbox()
    for text in texts:
        outbox.put(stream, Delta(0, text))
        outbox.flush()
    stream._choices[0] = Choice(0, "".join(texts), (), "stop")
    stream._finish()
    outbox.put(stream, Delta(0, finish_reason="stop"))
    outbox.flush()


TEXTS = [str(i) for i in range(300)]


def test_a_thread_reads_while_another_writes() -> None:
    stream, aborted = make()
    writer = threading.Thread(target=feed, args=(stream, TEXTS))
    writer.start()
    assert [delta.text for delta in stream] == [*TEXTS, ""]
    writer.join()
    assert aborted == []


async def test_a_coroutine_reads_while_a_thread_writes() -> None:
    stream, aborted = make()
    writer = threading.Thread(target=feed, args=(stream, TEXTS))
    writer.start()
    assert [delta.text async for delta in stream] == [*TEXTS, ""]
    writer.join()
    assert aborted == []


async def test_many_coroutines_are_woken_each_by_its_own_tokens() -> None:
    streams = [make()[0] for _ in range(20)]
    readers = [asyncio.create_task(stream.aresult()) for stream in streams]
    writers = [threading.Thread(target=feed, args=(stream, TEXTS[:50])) for stream in streams]
    for writer in writers:
        writer.start()
    results = await asyncio.gather(*readers)
    assert [result.text for result in results] == ["".join(TEXTS[:50])] * 20


def test_the_iteration_ends_after_the_last_choice() -> None:
    stream, _ = make(2)
    outbox = Outbox()
    for delta in (
        Delta(0, "a"),
        Delta(1, "b", finish_reason="stop"),
        Delta(0, "c", finish_reason="length"),
    ):
        outbox.put(stream, delta)
    outbox.flush()
    stream._finish()
    assert [(delta.index, delta.text) for delta in stream] == [(0, "a"), (1, "b"), (0, "c")]


def test_leaving_a_stream_early_aborts_the_request() -> None:
    stream, aborted = make()
    outbox = Outbox()
    outbox.put(stream, Delta(0, "a"))
    outbox.flush()
    for _ in stream:
        break
    assert aborted == [stream]


async def test_cancelling_the_wait_for_a_result_aborts_the_request() -> None:
    stream, aborted = make()
    waiting = asyncio.create_task(stream.aresult())
    await asyncio.wait([waiting], timeout=0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert aborted == [stream]


def test_a_failure_is_raised_out_of_the_iteration() -> None:
    """ERRORS-3: waiting requests get an error, not silence."""
    stream, aborted = make()
    outbox = Outbox()
    stream._finish()
    outbox.put(stream, EngineDead("gone"))
    outbox.flush()
    with pytest.raises(EngineDead, match="gone"):
        stream.result()
    assert aborted == []


def test_a_failure_is_no_empty_answer_to_whoever_asks_again() -> None:
    stream, _ = make()
    outbox = Outbox()
    outbox.put(stream, EngineDead("gone"))
    outbox.flush()
    for _ in range(2):
        with pytest.raises(EngineDead):
            stream.result()


def test_a_closed_loop_aborts_what_it_was_waiting_for() -> None:
    stream, aborted = make()

    async def listen() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream.__aiter__()), 0.001)

    asyncio.run(listen())
    aborted.clear()
    outbox = Outbox()
    outbox.put(stream, Delta(0, "late"))
    outbox.flush()
    assert aborted == [stream]
