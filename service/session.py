"""Sessions: chats with an engine in this process, which can fork, go back, and stay resident.

Knows where each session stands and when its lease changes hands; nothing of how text becomes tokens
(session_text.py), of how blocks are held (session_hold.py) or of what a session is given once
(session_opening.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from radixkv.errors import ContextTooLong, InvalidRequest
from radixkv.service.engine.origin import Origin
from radixkv.service.session_arguments import named, one_answer, whole
from radixkv.service.session_hold import Hold, Holds, SessionLease
from radixkv.service.session_reply import Reply, Turn
from radixkv.service.session_snapshot import Snapshot
from radixkv.service.session_text import Message, Transcript, Writer
from radixkv.tokens import encode

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Setting:
    """What a session and all its forks have in common."""

    engine: Engine
    holds: Holds
    writer: Writer
    origin: Origin
    sampling: Mapping[str, Any]


class Session:
    """A conversation with an engine: made by ``Engine.session``.

    >>> with engine.session(system="Be brief.", temperature=0) as s:         # doctest: +SKIP
    ...     for text in s.send("Name a colour."):
    ...         print(text, end="")
    ...     a, b = s.fork(2)
    ...     print(a.send("And a fruit of it?").result().text)
    ...     s.rewind(0)

    *It stands at a snapshot that never changes.* ``send`` moves it on when the reply was read,
    ``rewind`` moves it back; forks begin where it stands, and neither sees what the other says.
    While a reply is open, the session is where it was before: forks of it begin there.

    *What it stands on stays resident.* From the moment an answer ends the session holds a lease on
    the KV of all tokens up to there, the last, partial block too, so that the next ``send``
    computes only what is new. A lease is a pin: it lives within the tenant's share of what may be
    pinned (``pin_budget``), and within ``budget_blocks`` if that is given; ``lease`` says how much
    is held and why not more. Forks share it: a fork copies nothing, and its first ``send`` copies
    at most the one partial block. It ends with the last session that stands there (``close``,
    ``with``, or when Python forgets it), or when nobody sent anything for ``ttl_s``. Then, and
    wherever KV is missing, things work on, and are computed again.

    *Its history is the ids that the model was given and generated*, never made again from text.
    The template is rendered for every ``send``, and what it adds is tokenized. Where it writes an
    earlier answer otherwise than it was generated (Qwen3 and DeepSeek-R1 leave out what was
    thought, some strip spaces), the chat is what the template says: that answer is tokenized anew,
    and what comes before it is still a hit.

    *A copy is a fork*: ``copy.copy`` and ``copy.deepcopy`` do what ``branch`` does, for whatever
    holds KV must be counted. It belongs to this process and cannot be pickled.

    May be used from any thread and from coroutines; nothing waits but reading a reply and, for the
    end of a step, ``cached_tokens`` and ``lease``. One reply at a time: fork to ask more at once.
    """

    def __init__(self, setting: Setting, at: Snapshot, hold: Hold, seed: int | None = None) -> None:
        """Takes over one use of ``hold``."""
        self._setting = setting
        self._at = at
        self._hold = hold
        self._seed = seed
        self._num_forks = 0
        self._reply: Reply | None = None
        self._sending = False
        self._closed = False

    # ---- talking --------------------------------------------------------------------------------

    def send(self, content: Any, **sampling: Any) -> Reply:
        """Say something and return the reply, which begins at once; never waits.

        ``content`` is a user's message as text, a message (a mapping), or several, such as the
        results of tools; in a session without a template, text or token ids. ``sampling`` are
        fields of SamplingParams (and ``json_schema=``, ``regex=``...), for this time only. Raises
        InvalidRequest if the session is closed or a reply is open, ContextTooLong saying by how
        many tokens, and what ``Engine.submit`` raises; and then the session is where it was.
        """
        setting, holds = self._setting, self._setting.holds
        with holds.lock:
            self._expect_open("send to")
            if self._answering:
                raise InvalidRequest(
                    "a reply of this session is still open: read it to its end (result()) or "
                    "close() it; to ask several things at once, fork the session"
                )
            self._sending = True
        try:
            at = self._at
            params = one_answer({**setting.sampling, "seed": self._seed, **named(sampling)})
            prompt = setting.writer.ask(at.transcript, content)
            ids = prompt.ids
            before = self._hold
            if at.number == 0 and not before.tokens:  # no answer told what this place has
                before.tokens = encode(setting.writer.ids(at.transcript))
            hold = before.another()
            try:
                stream = setting.engine.submit(
                    ids,
                    params,
                    origin=setting.origin,
                    param=setting.writer.param,
                    on_choice=holds.at_end(hold, before),
                )
            except ContextTooLong as error:
                _say_what_is_long(error, had=len(at.transcript.ids), num_tokens=len(ids))
                raise
            reply = Reply(
                stream,
                partial(self._settle, prompt, hold),
                setting.writer.read,
                sent=content,
                number=at.number + 1,
            )
            with holds.lock:
                self._reply, closed = reply, self._closed
        finally:
            self._sending = False
        if closed:  # meanwhile, by another thread, which saw no reply that it could abort
            reply.close()
            self._expect_open("send to")
        return reply

    # ---- going elsewhere ------------------------------------------------------------------------

    def fork(self, n: int = 2) -> list[Session]:
        """Return ``n`` sessions that stand where this one stands. Never waits; copies nothing.

        Each is to be closed by itself. If this session has a seed, each fork gets one of its own,
        drawn from that and from which fork it is: else all would answer the same.
        """
        n = whole("n", n)
        if n < 1:
            raise InvalidRequest(f"fork({n}); wanted 1 or more", param="n")
        with self._setting.holds.lock:
            self._expect_open("fork")
            return [self._fork() for _ in range(n)]

    def branch(self) -> Session:
        """Return one more session that stands where this one stands, as ``fork`` does."""
        return self.fork(1)[0]

    def rewind(self, turn: int) -> Session:
        """Go back to the end of ``turn`` (0: to the beginning; -1: one turn back); returns itself.

        What came after is let go, unless a fork holds it. Never waits. Raises InvalidRequest if
        there is no such turn or a reply is open.
        """
        turn, holds = whole("turn", turn), self._setting.holds
        with holds.lock:
            self._expect_open("rewind")
            if self._answering:
                raise InvalidRequest("a reply of this session is open: read or close() it first")
            at = self._at.back_to(turn)
            if at is not self._at:
                self._at = at
                tokens = encode(self._setting.writer.ids(at.transcript))
                self._hold = holds.moved(self._hold, tokens)
        return self

    def close(self) -> None:
        """Let go what is held, and abort an open reply. Never waits; idempotent.

        A ``send`` that another thread is in the middle of is aborted and raises InvalidRequest.
        """
        with self._setting.holds.lock:
            if self._closed:
                return
            self._closed, reply = True, self._reply
        if reply is not None:
            reply.close()
        self._setting.holds.give(self._hold)

    # ---- where it stands ------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was sent and answered, the first first."""
        return self._at.turns

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat up to here, for reading; empty in a session without a template."""
        return self._at.transcript.messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids up to here, as used and generated; before the first turn, those with which
        the template begins any chat of this session."""
        return self._setting.writer.ids(self._at.transcript)

    @property
    def cached_tokens(self) -> int:
        """How many of ``tokens`` are resident now: what the next send will find at least. Waits for
        the end of a step. Raises EngineDead."""
        tokens = self.tokens
        if not tokens:
            return 0
        # One more, for a look-up leaves the last token to compute.
        view, origin = self._setting.engine.cache, self._setting.origin
        return min(view.lookup((*tokens, 0), origin=origin), len(tokens))

    @property
    def lease(self) -> SessionLease:
        """What is held now, and if less than all, why. Waits for the end of a step."""
        return self._setting.holds.look(self._hold)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"<Session: {state}{self._at.number} turns, {len(self._at.transcript.ids)} tokens>"

    def __copy__(self) -> Session:
        return self.branch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self.branch()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a session belongs to its engine and cannot be pickled: fork() it to have another in "
            "this process; to go on elsewhere, keep its messages"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def _answering(self) -> bool:
        """Whether a reply is open, or about to be."""
        return self._sending or self._reply is not None

    def _expect_open(self, verb: str) -> None:
        if self._closed:
            raise InvalidRequest(f"this session is closed: {verb} one that is open, or a fork")

    def _fork(self) -> Session:
        """Holds the lock."""
        hold = self._setting.holds.share(self._hold)
        seed, self._num_forks = self._seed, self._num_forks + 1
        if seed is not None:
            drawn = hashlib.blake2b(f"{seed}/{self._num_forks}".encode(), digest_size=8).digest()
            seed = int.from_bytes(drawn) >> 1
        return Session(self._setting, self._at, hold, seed)

    def _settle(self, prompt: Transcript, hold: Hold, turn: Turn | None) -> None:
        """The reply was read or left: go on to what it says, if it says anything."""
        holds, gone = self._setting.holds, hold
        after: Snapshot | None = None
        try:
            if turn is not None:
                transcript = self._setting.writer.answer(prompt, turn.text, turn.token_ids)
                after = self._at.then(transcript, turn)
        finally:  # also where that fails: then nothing was sent
            with holds.lock:
                self._reply = None
                if after is not None and not self._closed:
                    self._at = after
                    gone, self._hold = self._hold, hold
            holds.give(gone)
        # It may hold more than was read, or less than there is room for since that was given back.
        if turn is not None and (turn.finish_reason == "abort" or hold.short == "budget"):
            holds.settle(hold, len(prompt.ids) + len(turn.token_ids))


def _say_what_is_long(error: ContextTooLong, *, had: int, num_tokens: int) -> None:
    answer = error.max_tokens or 1
    error.args = (
        f"{error} The session has {had} tokens, this adds {num_tokens - had}, and with "
        f"{answer} for an answer that is {num_tokens + answer - error.limit} too many: "
        "rewind it, or begin another with a summary.",
    )
