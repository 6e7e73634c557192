"""What becomes of a request: taken, begun, given its tokens one by one, ended one way or another.

Knows requests, their choices and what their consumers are to be told; nothing of batches, or of
whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.errors import RadixKVError
from radixkv.service.engine.best import best_of, whole
from radixkv.service.engine.params import Choice, Delta, Usage
from radixkv.service.engine.request import Request, Sequence

if TYPE_CHECKING:
    from radixkv.service.engine.counters import Counters
    from radixkv.service.engine.sampling import ChoiceSampler, SampledToken
    from radixkv.service.engine.scheduler import Scheduler
    from radixkv.service.engine.stopping import ChoiceStream
    from radixkv.service.engine.stream import Outbox, Stream


class Answering:
    """The requests that are not over. Used by the engine thread only, but for ``in_flight``."""

    def __init__(
        self,
        scheduler: Scheduler,
        counters: Counters,
        outbox: Outbox,
        *,
        make_choice: Callable[[Request, int], tuple[ChoiceSampler, ChoiceStream]],
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._outbox = outbox
        self._make_choice = make_choice
        self._requests: dict[Stream, Request] = {}  # taken and not finished

    def take(self, request: Request) -> None:
        """Count ``request``; from now on its consumer will be told of its end."""
        self._requests[request.stream] = request
        self._counters.requests += 1

    def begin(self, request: Request) -> None:
        """Give ``request`` its identity and its first choice."""
        request.identity = request.identify()
        request.sequences.append(self._choice(request, 0))

    def _choice(self, request: Request, index: int) -> Sequence:
        sampler, output = self._make_choice(request, index)
        return Sequence(
            request,
            index,
            sampler,
            output,
            tokens=bytearray(request.prompt_bytes),
            ids=list(request.prompt_ids),
        )

    def fork(self, request: Request) -> list[Sequence]:
        """Begin the other choices of ``request``, whose prompt is computed, and return them."""
        if request.on_prompt is not None:
            request.on_prompt(request.sequences[0])
        born = [self._choice(request, i) for i in range(1, request.params.num_sequences)]
        self._scheduler.fork(request, born)
        return born

    def advance(self, seq: Sequence, token: SampledToken) -> None:
        """Give ``seq`` its next token and its consumer what can be said of it."""
        request, stream = seq.request, seq.request.stream
        if token.error is not None:
            error = token.error
            self.fail(request, RadixKVError(error) if isinstance(error, str) else error)
        if stream.finished:  # failed, perhaps through a sibling in this very step
            return
        seq.append(token.token_id)
        request.completion_tokens += 1
        self._counters.note_generated(request, 1)
        self._update_usage(request)
        delta = seq.output.push(token)
        if request.params.selects:
            assert token.logprob is not None, "drawn for a request that selects"
            seq.total += token.logprob
            delta = None  # it may not be among those that are returned
        if seq.output.finished:
            self._scheduler.finish(seq)
            self._close_choice(seq)
        if delta is not None:
            self._outbox.put(stream, delta)

    def _close_choice(self, seq: Sequence) -> None:
        """Record a finished choice; with the last one the request is over."""
        request, choice = seq.request, seq.output.choice()
        if request.params.selects:
            request.drawn.append((seq, choice))
            if not request.sequences:
                self.end_whole(request, best_of(request))
            return
        request.stream._choices[seq.index] = choice
        if request.on_choice is not None:
            request.on_choice(seq)
        if not request.sequences:
            self._counters.finished[choice.finish_reason] += 1
            self._forget(request)

    def end_whole(self, request: Request, choices: list[Choice]) -> None:
        """A request is over that says nothing before its end."""
        self._counters.finished[choices[0].finish_reason] += 1
        for choice in choices:
            request.stream._choices[choice.index] = choice
        self._forget(request)
        for choice in choices:
            self._outbox.put(request.stream, whole(choice))

    def abort(self, stream: Stream) -> None:
        """Every choice that is not finished ends here and its blocks are let go."""
        request = self._requests.get(stream)
        if request is None:  # it has ended by itself in the meantime
            return
        for seq in list(request.sequences):
            self._scheduler.finish(seq, publish=request.beams is None)
            if request.beams is not None or request.params.selects:
                continue
            self._finish_output(request, seq.output, seq.index)
            if request.on_choice is not None:
                request.on_choice(seq)
        request.first_choice = None  # it may have been drawn from, or be over
        for index in range(request.params.n):
            if index not in stream._choices:  # never born, or not selected
                self._finish_output(request, self._make_choice(request, index)[1], index)
        self._counters.finished["abort"] += 1
        self._forget(request)

    def _finish_output(self, request: Request, output: ChoiceStream, index: int) -> None:
        delta: Delta = output.end("abort")
        request.stream._choices[index] = output.choice()
        self._outbox.put(request.stream, delta)

    def fail(self, request: Request, error: BaseException) -> None:
        """One request cannot go on; the others do."""
        if request.stream.finished:
            return
        for seq in list(request.sequences):
            self._scheduler.finish(seq, publish=False)
        self._counters.failed += 1
        self._forget(request)
        self._outbox.put(request.stream, error)

    def abandon(self, why: Callable[[], BaseException]) -> None:
        """Tell the consumers of all that is not over that no more will come."""
        for request in list(self._requests.values()):
            self._forget(request)
            self._outbox.put(request.stream, why())

    def _forget(self, request: Request) -> None:
        self._update_usage(request)
        self._counters.observer.finished(request)
        request.stream._finish()
        self._requests.pop(request.stream, None)

    def _update_usage(self, request: Request) -> None:
        request.stream.usage = Usage(
            len(request.prompt_ids), request.completion_tokens, request.cached_tokens or 0
        )

    def weights_changed(self) -> None:
        """What the running requests have computed belongs to no identity from now on (ADMIN-2).

        Those that hold nothing start with the new weights, and so under their identity.
        """
        for request in self._requests.values():
            request.may_publish = all(seq.table is None for seq in request.sequences)
            if request.may_publish:
                request.identity = request.identify()
                self._scheduler.forget_saved(request)

    def in_flight(self) -> list[Request]:
        """Return the requests that were submitted and are not over. From any thread."""
        return [*self._requests.values()]
