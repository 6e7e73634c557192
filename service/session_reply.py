"""The answer to one send of a session, as it is made.

Knows a stream of deltas and what was read of it; nothing of templates, leases or other turns. What
becomes of the answer, the session says, once: when it was read to its end or left.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import Delta, FinishReason, TokenLogprob, Usage
from radixkv.service.engine.stream import Stream
from radixkv.service.tools_pieces import Answer, ToolCall


@dataclass(frozen=True, slots=True)
class Turn:
    """What was sent once, and what came back."""

    number: int
    """1 is the first: ``Session.rewind(number)`` goes back to the end of this one."""
    sent: Any
    """What was given to ``send``."""
    text: str
    """All that was said, calls of tools included as the model wrote them."""
    content: str
    """The text without the calls."""
    calls: tuple[ToolCall, ...]
    """The calls of the session's tools, in order."""
    token_ids: tuple[int, ...]
    """As generated, without what ended the answer."""
    finish_reason: FinishReason
    """``abort`` where the answer was left early: it is what was read of it."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it, if one did."""
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt, all turns before included, that were not computed again."""
        return self.usage.cached_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.usage.prompt_tokens - self.usage.cached_tokens


class Reply:
    """Iterate it for pieces of text (``for`` or ``async for``), or wait: ``result()``, ``await``.

    Read to its end, it becomes a turn of its session. Leaving it early (``break``, ``close()``, an
    exception, a cancelled task) aborts it within one step; what was read until then becomes the
    turn, so that the session knows what its reader knows. Where nothing was read, or the engine
    failed, the session is as if nothing had been sent. One reader at a time.
    """

    def __init__(
        self,
        stream: Stream,
        settle: Callable[[Turn | None], None],
        read: Callable[[str], Answer],
        *,
        sent: Any,
        number: int,
    ) -> None:
        """``settle`` is told the turn, or None if there is none, before the reader knows, and lets
        the session go on even where it raises; ``read`` tells an answer's text from its calls."""
        self._stream = stream
        self._read = read
        self._settle = settle
        self._sent = sent
        self._number = number
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._last: Delta | None = None
        self._turn: Turn | None = None
        self._error: BaseException | None = None
        self._open = True
        self._ending = False  # by the thread that has the lock
        self._lock = threading.RLock()  # of what was read, and what became of it

    # ---- reading --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        if not self._open:
            return
        try:
            for delta in self._stream:
                if not self._take(delta):  # it was closed by somebody else
                    break
                if delta.text:
                    yield delta.text
        except GeneratorExit:
            self._end(wait=False)  # it may be the garbage collector, anywhere
            raise
        except Exception as error:
            self._end(error)
            raise
        except BaseException:
            self._end()
            raise
        else:
            self._end()

    def __aiter__(self) -> AsyncIterator[str]:
        return _Pieces(self)

    def result(self) -> Turn:
        """Wait for the whole answer. Raises EngineDead if the engine ends first, and InvalidRequest
        if the reply was left before anything was read."""
        for _ in self:
            pass
        return self._result()

    async def aresult(self) -> Turn:
        """Wait for the whole answer without blocking the loop; a cancelled wait leaves it early."""
        async for _ in self:
            pass
        return self._result()

    def __await__(self) -> Generator[Any, None, Turn]:
        return self.aresult().__await__()

    def close(self) -> None:
        """Leave it, if it was not read to its end. Waits for nothing but another thread that is
        about to end it; then it has ended."""
        self._end()

    # ---- what there is so far -------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether it was neither read to its end nor left."""
        return self._open

    @property
    def request_id(self) -> str:
        """What the engine calls the request."""
        return self._stream.request_id

    @property
    def text(self) -> str:
        """What was read so far. Never waits."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that were read so far."""
        return tuple(self._ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None before."""
        if self._turn is not None:
            return self._turn.finish_reason
        return None if self._open else "abort"

    @property
    def usage(self) -> Usage:
        """Tokens, as of the last step."""
        return self._stream.usage

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the cache gave; 0 before the request is admitted."""
        return self._stream.usage.cached_tokens

    # ---- inside ---------------------------------------------------------------------------------

    def _take(self, delta: Delta) -> bool:
        """Whether it was still open, so that the reader may see ``delta``."""
        with self._lock:
            if not self._open:
                return False
            self._text.append(delta.text)
            self._ids.extend(delta.token_ids)
            if delta.logprobs is not None:
                self._logprobs = [*(self._logprobs or ()), *delta.logprobs]
            self._last = delta
            return True

    def _end(self, error: Exception | None = None, *, wait: bool = True) -> None:
        """Say once what became of it. Who comes while another thread does waits for that, or else
        would find neither a turn nor a session that can go on; but with ``wait=False``.

        Whatever runs in the garbage collector must not wait: the thread that it stopped may hold
        what the other one needs.
        """
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if not self._open or self._ending:  # ending: in this thread, below on the stack
                return
            self._ending = True
            try:
                self._stream.abort()
                self._error = error
                try:
                    turn = None if error is not None else self._read_so_far()
                except BaseException:
                    self._settle(None)
                    raise
                self._settle(turn)
                self._turn = turn
            except BaseException as failure:
                self._error = failure
                raise
            finally:
                self._ending, self._open = False, False
        finally:
            self._lock.release()

    def _read_so_far(self) -> Turn | None:
        last = self._last
        said = bool(self._ids or self.text)
        if last is None or not (said or last.finish_reason in ("stop", "length")):
            return None
        answer = self._read(self.text)
        return Turn(
            number=self._number,
            sent=self._sent,
            text=self.text,
            content=answer.text,
            calls=answer.calls,
            token_ids=self.token_ids,
            finish_reason=last.finish_reason or "abort",
            stop_reason=last.stop_reason,
            usage=self._stream.usage,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )

    def _result(self) -> Turn:
        if self._error is not None:
            raise self._error
        if self._turn is None:
            raise InvalidRequest("this reply was left before anything was read")
        return self._turn


class _Pieces:
    """One reading of a reply by a coroutine; ends with it, also where it is just dropped."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._deltas = aiter(reply._stream)

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> str:
        reply = self._reply
        if not reply._open:
            raise StopAsyncIteration
        try:
            while True:
                delta = await anext(self._deltas)
                if not reply._take(delta):
                    raise StopAsyncIteration
                if delta.text:
                    return delta.text
        except StopAsyncIteration:
            reply._end()
            raise
        except Exception as error:
            reply._end(error)
            raise
        except BaseException:  # cancelled
            reply._end()
            raise

    def __del__(self) -> None:
        self._reply._end(wait=False)
