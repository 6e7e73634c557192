"""Follow one choice from token to token: its text, its end, and what may be said of it already.

Knows text, stops and counts; nothing of logits, blocks or requests.

*What a delta holds.* Text is whole characters, and never any part of a stop string that ends the
choice: characters that may be the head of one are held back, and no others. A token is listed (its
id, and its log-probability) once all of its text has been said; so neither eos, nor a stop token,
nor a token with any part of the stop string in it is ever listed. With log-probabilities text waits
for whole tokens too, so that in every delta the listed tokens join to the text; only the last
delta's text may go on with the head of a token that a stop string cuts in two. (Characters split
over tokens join as bytes. Special tokens that end nothing are listed by name and add no text.)

*When a choice ends.* At least ``min_tokens`` tokens come before eos or a stop token, and at least
as many have come when a stop string is complete; one that is complete earlier is text like any
other. A token that its grammar lets nothing follow ends a choice, however few have come. At the end
what was held is said; if that completes a stop string, it counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from radixkv.service.engine.detokenize import Detokenizer, TokenText
from radixkv.service.engine.logprobs import token_logprob
from radixkv.service.engine.params import Choice, Delta, FinishReason, SamplingParams, TokenLogprob
from radixkv.service.engine.sampling import SampledToken
from radixkv.service.engine.stop_strings import Match, StopMatcher

Listed = tuple[int, TokenLogprob | None]


class ChoiceStream:
    """One choice, as tokens are pushed; once ``finished``, nothing is pushed any more."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        token_text: TokenText,
        *,
        eos_token_ids: Iterable[int],
        max_tokens: int,
    ) -> None:
        self.index = index
        self.finished = False
        self.num_tokens = 0
        """All tokens sampled, listed or not."""
        self._ends_text = frozenset(eos_token_ids)
        self._eos = frozenset() if params.ignore_eos else self._ends_text
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._min_tokens, self._max_tokens = params.min_tokens, max_tokens
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._wants_logprobs = params.logprobs is not None
        self._token_text = token_text
        self._detokenizer = Detokenizer(token_text)

        # text[:_said] is out, _held is text[_said:_length]; _ends are of the first of _unlisted
        self._said = 0
        self._length = 0
        self._held = ""
        self._unlisted: deque[Listed] = deque()
        self._ends: deque[int] = deque()
        self._text: list[str] = []
        self._listed: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def ending(self) -> frozenset[int]:
        """The tokens that end a choice."""
        return self._eos | self._stop_tokens

    def push(self, token: SampledToken) -> Delta | None:
        """Take the next token; None if nothing can be said yet. O(the token's text) amortised."""
        assert not self.finished, "a finished choice takes no more tokens"
        token_id = token.token_id
        self.num_tokens += 1
        if self.num_tokens > self._min_tokens:
            if token_id in self._eos:
                return self._finish("stop", None)
            if token_id in self._stop_tokens:
                return self._finish("stop", token_id)
        if token.final and token_id in self._ends_text:
            return self._finish("stop", None)
        logprob = None
        if self._wants_logprobs:
            logprob = token_logprob(token, self._detokenizer.next_bytes)
        self._unlisted.append((token_id, logprob))
        match = self._read(self._detokenizer.push(token_id))
        if match is not None:
            return self._close(match.start, "stop", match.stop)
        if token.final:
            return self._finish("stop", None)
        if self.num_tokens >= self._max_tokens:
            return self._finish("length", None)
        return self._advance()

    def end(self, reason: FinishReason) -> Delta:
        """End the choice from outside and say what was held."""
        assert not self.finished, "a choice ends once"
        return self._finish(reason, None)

    def choice(self) -> Choice:
        """Return the whole of a finished choice: its deltas, joined."""
        assert self._finish_reason is not None, "the choice has not finished"
        return Choice(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self._listed),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
        )

    def _read(self, text: str) -> Match | None:
        """Take note of new text and of the tokens that end in it."""
        self._ends.extend(self._detokenizer.settled())
        if not text:
            return None
        self._length += len(text)
        self._held += text
        if self._matcher is None:
            return None
        return self._matcher.feed(text, armed=self.num_tokens >= self._min_tokens)

    def _finish(self, reason: FinishReason, stop_reason: int | None) -> Delta:
        match = self._read(self._detokenizer.flush())
        if match is None:
            return self._close(self._length, reason, stop_reason)
        if reason == "abort":
            return self._close(match.start, reason, None)
        return self._close(match.start, "stop", match.stop)

    def _close(self, upto: int, reason: FinishReason, stop_reason: int | str | None) -> Delta:
        self.finished = True
        self._finish_reason, self._stop_reason = reason, stop_reason
        listed, _ = self._take_listed(upto)
        return self._say(upto, listed)

    def _advance(self) -> Delta | None:
        """Say what can be said after a token that did not end the choice."""
        upto = self._length - (self._matcher.held if self._matcher else 0)
        listed, end = self._take_listed(upto)
        if self._wants_logprobs:
            upto = end
        if upto == self._said and not listed:
            return None
        return self._say(upto, listed)

    def _take_listed(self, upto: int) -> tuple[list[Listed], int]:
        """Take the tokens whose text ends at ``upto`` or before, and where the last one's ends."""
        listed: list[Listed] = []
        end = self._said
        while self._ends and self._ends[0] <= upto:
            end = self._ends.popleft()
            listed.append(self._unlisted.popleft())
        return listed, end

    def _say(self, upto: int, listed: list[Listed]) -> Delta:
        length = upto - self._said
        text, self._held, self._said = self._held[:length], self._held[length:], upto
        token_ids = tuple(token_id for token_id, _ in listed)
        logprobs = tuple(logprob for _, logprob in listed if logprob is not None)
        self._text.append(text)
        self._listed.extend(token_ids)
        self._logprobs.extend(logprobs)
        return Delta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self._wants_logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
