"""Replies of sessions: read by threads and coroutines, to the end, in part, or not at all."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv import Engine, Reply, Session
from radixkv.errors import InvalidRequest
from tests.session_cases import GREEDY, SYSTEM, flood, session_engine

LONG = GREEDY | {"max_tokens": 400}


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with session_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert shared.check() == [] and shared.pins.of() == []
    assert shared.stats().num_running == shared.stats().num_waiting == 0
    shared.cache.reset()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        yield s


@contextmanager
def still(engine: Engine) -> Iterator[None]:
    """Let the engine begin no step inside."""
    release = threading.Event()
    waiting = engine._core.call(release.wait)
    try:
        yield
    finally:
        release.set()
        waiting.result()


def read(reply: Reply, num_pieces: int) -> list[str]:
    pieces = []
    for piece in reply:
        pieces.append(piece)
        if len(pieces) == num_pieces:
            break
    return pieces


def after(session: Session, text: str) -> tuple[int, ...]:
    """What the engine says to the session's tokens and ``text``, with nothing cached."""
    engine = session._setting.engine
    said = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = [*session.tokens, *engine.tokenize(said, add_special_tokens=False)]
    return engine.generate(ids, salt="cold", **GREEDY).token_ids


def test_leaving_early_keeps_what_was_read_and_ends_the_rest(
    engine: Engine, session: Session
) -> None:
    before = session.tokens
    whole = session.branch().send("a", **LONG).result()
    reply = session.send("a", **LONG)
    pieces = read(reply, 5)
    turn = session.turns[-1]
    assert not reply.open and reply.result() is turn and reply.finish_reason == "abort"
    assert turn.text == "".join(pieces) == reply.text and turn.finish_reason == "abort"
    assert 0 < len(turn.token_ids) < 400
    assert turn.token_ids == whole.token_ids[: len(turn.token_ids)]
    assert list(reply) == [], "it was left"
    prompt = session.tokens[: len(session.tokens) - len(turn.token_ids)]
    assert prompt[: len(before)] == before and len(prompt) == turn.usage.prompt_tokens
    lease = session.lease
    assert lease.short is None and lease.tokens == lease.wanted_tokens
    assert len(session.tokens) - 1 <= lease.tokens <= len(session.tokens)
    expected = after(session, "b")
    flood(engine)
    again = session.send("b").result()
    assert again.cached_tokens == lease.tokens and again.token_ids == expected


def test_a_reply_that_is_closed_unread_was_never_sent(engine: Engine, session: Session) -> None:
    before, held = (session.tokens, session.turns), session.lease.tokens
    with still(engine):
        reply = session.send("a", **LONG)
        reply.close()
        reply.close()
    assert (session.tokens, session.turns) == before and session.lease.tokens == held
    with pytest.raises(InvalidRequest, match="before anything was read"):
        reply.result()
    assert reply.finish_reason == "abort" and reply.text == ""
    assert session.send("a").result().token_ids == after_first(session, "a")


def after_first(session: Session, text: str) -> tuple[int, ...]:
    with session.branch() as fork:
        return after(fork.rewind(1), text)


def test_a_reader_who_fails_leaves_it_too(session: Session) -> None:
    with pytest.raises(ZeroDivisionError):
        for piece in session.send("a", **LONG):
            _ = len(piece) / 0
    assert len(session.turns) == 2 and session.turns[1].finish_reason == "abort"
    assert session.send("b").result().token_ids == session.turns[-1].token_ids


def test_one_reply_at_a_time_and_forks_begin_before_it(engine: Engine, session: Session) -> None:
    reply = session.send("a")
    with pytest.raises(InvalidRequest, match="still open"):
        session.send("b")
    with pytest.raises(InvalidRequest, match="is open"):
        session.rewind(0)
    with session.branch() as fork:
        assert len(fork.turns) == 1
        assert fork.send("a").result().token_ids == reply.result().token_ids
    assert len(session.turns) == 2
    session.send("b").result()


def test_closing_a_session_ends_its_open_reply(engine: Engine) -> None:
    session = engine.session(**LONG)
    reply = session.send("hello")
    session.close()
    assert not reply.open and session.turns == () and engine.pins.of() == []
    assert list(reply) == []


def test_a_reply_can_be_closed_by_somebody_else_while_it_is_read(session: Session) -> None:
    reply = session.send("a", **LONG)
    pieces = []
    for piece in reply:
        pieces.append(piece)
        if len(pieces) == 3:
            other = threading.Thread(target=reply.close)
            other.start()
            other.join()
    assert len(pieces) == 3 and session.turns[-1].text == "".join(pieces)


class Watched:
    """A lock that tells when a thread other than the one that made it comes."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._mine = threading.get_ident()
        self.asked = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if threading.get_ident() != self._mine:
            self.asked.set()
        return bool(self._lock.acquire(blocking))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_who_closes_a_reply_while_its_reader_ends_it_waits_for_the_turn(session: Session) -> None:
    reply = session.send("a")
    lock, settle, found = Watched(reply._lock), reply._settle, []
    reply._lock = lock  # type: ignore[assignment]

    def close() -> None:
        reply.close()
        found.append((reply.open, session._reply, reply.result()))

    other = threading.Thread(target=close)

    def settle_late(turn: Any) -> None:
        other.start()
        assert lock.asked.wait(60)
        settle(turn)

    reply._settle = settle_late
    turn = reply.result()
    other.join()
    assert found == [(False, None, turn)] and session.turns[-1] is turn
    assert session.send("b").result().number == turn.number + 1


def test_nothing_is_read_of_a_reply_that_somebody_else_closed_unread(session: Session) -> None:
    reply = session.send("a")
    take = reply._take

    def closed_before(delta: Any) -> bool:
        other = threading.Thread(target=reply.close)
        other.start()
        other.join()
        return take(delta)

    reply._take = closed_before  # type: ignore[method-assign]
    assert list(reply) == [] and reply.token_ids == () and len(session.turns) == 1


@pytest.mark.parametrize("failing", ["read", "answer"])
def test_a_session_goes_on_where_an_answer_cannot_be_written_down(
    session: Session, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, writer = session.turns, session._setting.writer

    def fail(*_: object) -> Any:
        raise ValueError("no such answer")

    with monkeypatch.context() as patch:
        patch.setattr(writer, failing, fail)
        reply = session.send("a")
        for _ in range(2):
            with pytest.raises(ValueError, match="no such answer"):
                reply.result()
    assert not reply.open and session.turns == before
    assert session.send("a").result() is session.turns[-1]


def test_a_forgotten_reader_waits_for_nobody(session: Session) -> None:
    reply = session.send("a", **LONG)
    pieces = iter(reply)
    next(pieces)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with reply._lock:
            held.set()
            assert release.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    del pieces  # as the garbage collector does, wherever the thread is
    gc.collect()
    assert reply.open
    release.set()
    other.join()
    reply.close()
    assert session.turns[-1] is reply.result()


def test_closing_a_session_in_the_middle_of_a_send_aborts_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, submit, streams = engine.session(**LONG), engine.submit, []

    def closed_meanwhile(*args: Any, **kwargs: Any) -> Any:
        streams.append(submit(*args, **kwargs))
        other = threading.Thread(target=session.close)
        other.start()
        other.join()
        return streams[0]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", closed_meanwhile)
        with still(engine), pytest.raises(InvalidRequest, match="this session is closed: send to"):
            session.send("hello")
    assert streams[0].result().finish_reason == "abort"
    assert session.turns == () and session._reply is None


def test_an_unread_reply_that_is_forgotten_with_its_session_lets_go(engine: Engine) -> None:
    session = engine.session(**GREEDY)
    session.send("hello")
    del session
    gc.collect()
    while engine.stats().num_running + engine.stats().num_waiting:
        engine.check()
    assert engine.pins.of() == []


def test_an_abort_on_the_engines_side_is_a_turn_of_what_was_said(
    engine: Engine, session: Session
) -> None:
    reply = session.send("a", **LONG)
    pieces = iter(reply)
    text = next(pieces)
    reply._stream.abort()
    text += "".join(pieces)
    assert session.turns[-1].finish_reason == "abort" and session.turns[-1].text == text
    with still(engine):
        other = session.send("b", **LONG)
        other._stream.abort()
    assert list(other) == [] and len(session.turns) == 2
    with pytest.raises(InvalidRequest, match="before anything was read"):
        other.result()


# ---- coroutines ---------------------------------------------------------------------------------


async def test_coroutines_read_and_await_the_same(engine: Engine) -> None:
    async with (
        engine.session(system=SYSTEM, **GREEDY) as s,
        engine.session(system=SYSTEM, **GREEDY) as other,
    ):
        reply = s.send("hello")
        pieces = [piece async for piece in reply]
        assert len(pieces) > 1 and "".join(pieces) == s.turns[0].text
        turn = await other.send("hello")
        assert turn.token_ids == s.turns[0].token_ids == (await reply).token_ids
        forks = s.fork(4)
        turns = await asyncio.gather(
            *(fork.send(f"{i}", **GREEDY).aresult() for i, fork in enumerate(forks))
        )
        assert [turn.number for turn in turns] == [2] * 4 and len(s.turns) == 1
        assert all(turn.cached_tokens >= len(s.tokens) - 1 for turn in turns)
        for fork in forks:
            fork.close()


async def test_breaking_out_of_async_for_leaves_the_reply_at_once(session: Session) -> None:
    pieces = []
    async for piece in session.send("a", **LONG):
        pieces.append(piece)
        if len(pieces) == 3:
            break
    assert session.turns[-1].text == "".join(pieces)
    assert (await session.send("b")).number == 3


async def test_a_cancelled_reader_leaves_what_it_read(engine: Engine, session: Session) -> None:
    reply = session.send("a", **LONG)
    begun = asyncio.Event()

    async def reader() -> None:
        async for _ in reply:
            begun.set()

    task = asyncio.create_task(reader())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not reply.open and session.turns[-1].text == reply.text != ""
    with still(engine):
        waiting = asyncio.create_task(session.send("b", **LONG).aresult())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert len(session.turns) == 2
    assert (await session.send("b")).token_ids == session.turns[-1].token_ids


async def test_what_a_reply_knows_can_be_asked_at_any_time(engine: Engine) -> None:
    async with engine.session(system=SYSTEM, **GREEDY) as s:
        with still(engine):
            reply = s.send("hello", logprobs=1)
            assert (reply.open, reply.text, reply.token_ids) == (True, "", ())
            assert reply.finish_reason is None and reply.cached_tokens == 0
            assert reply.usage.prompt_tokens > 0 and reply.request_id
        turn = await reply
        assert reply.usage == turn.usage and reply.finish_reason == "length"
        assert turn.logprobs is not None and len(turn.logprobs) == 12


def test_sampling_of_a_send_goes_before_that_of_the_session(engine: Engine) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    with engine.session(**given) as s:
        assert len(s.send("hello").result().token_ids) == 3
        assert len(s.send("hello", max_tokens=5).result().token_ids) == 5
        assert len(s.send("hello").result().token_ids) == 3
