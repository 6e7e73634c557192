"""What a session has said so far, as text and as the token ids that were really used.

Knows templates and messages; nothing of engines, caches or leases, or of how the tokens of one
piece join those of another (session_pieces.py).

A transcript is made of pieces: what the template wrote, and what the model generated, whose ids are
kept and never made again from their text (two tokenizations of one text differ, and the KV of one
is no use to the other). To ask the next thing the whole chat is rendered anew, as text. As far as
that begins with the pieces that are there, their ids stay, and only the rest is tokenized:

    template         model       template                     model
    <user>Hi<bot>  | Hello!    | <end><user>And you?<bot>   | ...
    ids are kept ............. | the rest is tokenized

A template may write an answer otherwise than it was generated. It may strip spaces at its end: then
the ids before those stay. It may strip what was thought, or the marks that it had put into the
model's mouth: then that answer, and what the template wrote around it, is tokenized anew, and what
comes before stays as it is. So the ids always say what the template says.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from radixkv.errors import InvalidRequest
from radixkv.service.engine.prompting import Prompting
from radixkv.service.engine.public_prompts import chat_prefix
from radixkv.service.session_pieces import Joiner, Piece
from radixkv.service.tools_pieces import Answer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said up to some moment; pieces are shared with what came before and comes after."""

    messages: tuple[Message, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids, from the first."""
        return tuple(chain.from_iterable(piece.ids for piece in self.pieces))


class Writer(Protocol):
    """Makes one transcript of another, when something is asked and when it was answered."""

    param: str
    """What errors call that which was sent."""

    def ask(self, before: Transcript, content: Any) -> Transcript:
        """Return ``before`` and what was sent: the prompt. Raises InvalidRequest."""
        ...

    def answer(self, prompt: Transcript, text: str, ids: Sequence[int]) -> Transcript:
        """Return ``prompt`` and its answer: ``text``, of which ``ids`` are the tokens.

        The text may go on with the head of a token that a stop string has cut in two.
        """
        ...

    def ids(self, transcript: Transcript) -> tuple[int, ...]:
        """Return the ids with which every prompt begins that goes on from here, if the template
        lets it."""
        ...

    def read(self, text: str) -> Answer:
        """Tell an answer's text from its calls of tools."""
        ...


class ChatWriter:
    """Writes chats with the model's template."""

    param = "messages"

    def __init__(
        self,
        prompting: Prompting,
        tokenizer: Any,
        *,
        tools: Sequence[Message] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Raises InvalidRequest if there is no template, or it shows no tools. Copies these."""
        if not prompting.has_template:
            raise InvalidRequest(
                "this model's tokenizer has no chat template; ask for session(template=False)",
                param="messages",
            )
        if tools:
            prompting.expect_tools()
        self._prompting = prompting
        self._joiner = Joiner(prompting, tokenizer)
        self._rendering: dict[str, Any] = {
            "tools": copy.deepcopy(list(tools)) if tools else None,
            "template_kwargs": copy.deepcopy(dict(template_kwargs or {})),
        }

    def ask(self, before: Transcript, content: Any) -> Transcript:
        """Add a user's message (text), a message (a mapping) or several."""
        messages = (*before.messages, *read_messages(content))
        text = self._prompting.render_text(messages, **self._rendering)
        kept, at = self._keep(before.pieces, text)
        if at < len(text):
            rest = text[at:]
            kept.append(Piece(self._joiner.tokenize(rest, first=not kept), rest))
        return Transcript(messages, tuple(kept))

    def answer(self, prompt: Transcript, text: str, ids: Sequence[int]) -> Transcript:
        """Add an assistant's message."""
        said = {"role": "assistant", "content": text}
        return Transcript(
            (*prompt.messages, said), (*prompt.pieces, self._joiner.generated(prompt.pieces, ids))
        )

    def ids(self, transcript: Transcript) -> tuple[int, ...]:
        """Return all ids, or before the first answer those that any chat would begin with."""
        if transcript.pieces:
            return transcript.ids
        rendering = dict(self._rendering)
        kwargs, tools = rendering.pop("template_kwargs"), rendering.pop("tools")
        try:
            render = partial(self._prompting.render, tools=tools)
            return tuple(chat_prefix(render, transcript.messages, kwargs))
        except InvalidRequest:  # such chats have nothing in common
            return ()

    def read(self, text: str) -> Answer:
        """Read it as the template has the model write calls; nothing is one if nobody knows how."""
        return self._prompting.read_answer(text, self._rendering["tools"] or ())

    def _keep(self, pieces: Sequence[Piece], text: str) -> tuple[list[Piece], int]:
        """Return the pieces, or beginnings of them, that ``text`` begins with; and up to where."""
        kept: list[Piece] = []
        at = 0
        for piece in pieces:
            found = piece.found_in(text, at)
            if found is None:
                trimmed = self._joiner.trimmed(piece, text, at) if piece.generated else None
                if trimmed is not None:
                    kept.append(trimmed)
                    at += len(trimmed.text)
                elif piece.generated and kept and not kept[-1].generated:
                    # Tokens may join what the template wrote before it to what it has instead.
                    at -= len(kept.pop().text)
                break
            kept.append(piece)
            at += found
        return kept, at


class PlainWriter:
    """Writes down what is sent as it is, with nothing between."""

    param = "prompt"

    def __init__(self, prompting: Prompting, tokenizer: Any) -> None:
        self._prompting = prompting
        self._joiner = Joiner(prompting, tokenizer)

    def ask(self, before: Transcript, content: Any) -> Transcript:
        """Add text, or token ids."""
        if isinstance(content, str):
            if before.pieces:
                ids = self._joiner.tokenize(content, first=False)
            else:
                ids = tuple(self._prompting.tokenize(content))
            return Transcript((), (*before.pieces, Piece(ids, content)))
        try:
            if isinstance(content, bytes | bytearray | Mapping):  # of numbers, but no ids
                raise TypeError
            ids = tuple(map(operator.index, content))
        except TypeError:
            raise InvalidRequest(
                f"a send of {type(content).__name__}; wanted text or token ids", param=self.param
            ) from None
        if ids:
            self._prompting.check_ids(ids, self.param)
        return Transcript((), (*before.pieces, Piece(ids, self._joiner.said(ids))))

    def answer(self, prompt: Transcript, text: str, ids: Sequence[int]) -> Transcript:
        """Add what was generated; the head of a cut token is tokenized by itself."""
        piece = self._joiner.generated(prompt.pieces, ids)
        pieces = (*prompt.pieces, piece)
        if len(text) > len(piece.text) and text.startswith(piece.text):
            head = text[len(piece.text) :]
            pieces = (*pieces, Piece(self._joiner.tokenize(head, first=False), head))
        return Transcript((), pieces)

    def ids(self, transcript: Transcript) -> tuple[int, ...]:
        """Return all ids."""
        return transcript.ids

    def read(self, text: str) -> Answer:
        """All is text."""
        return Answer(text)


def read_messages(content: Any) -> list[Message]:
    """Return what was sent as messages, copied. Raises InvalidRequest for what is none."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages = [content] if isinstance(content, Mapping) else content
    if not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(
            f"a send of {type(content).__name__}; wanted text, a message or a list of messages",
            param="messages",
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest(
                f"a message is {message!r:.100}; wanted a mapping with a role", param="messages"
            )
    return [copy.deepcopy(dict(message)) for message in messages]
