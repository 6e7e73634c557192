"""What a step's logits make of the beams: candidates, a step of each search, and its end.

Knows requests, the scheduler and what is to be said; nothing of how a batch is computed. Of the
blocks of beams those of the prompt are published as ever; of what was generated only what becomes
part of an answer, so that beams that die leave nothing in the cache but free blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from radixkv.errors import InvalidRequest, RadixKVError
from radixkv.service.engine.beams_group import BeamGroup
from radixkv.service.engine.beams_running import move
from radixkv.service.engine.beams_search import BeamSearch, Candidates, Finished, find_candidates
from radixkv.service.engine.params import Choice
from radixkv.service.engine.request import Request, Sequence

if TYPE_CHECKING:
    from radixkv.service.engine.counters import Counters
    from radixkv.service.engine.sampling import ChoiceSampler
    from radixkv.service.engine.scheduler import Scheduler
    from radixkv.service.engine.stopping import ChoiceStream
    from radixkv.service.engine.work import Work


class BeamSteps:
    """Used by the engine thread only. ``end`` is told of a search that is over, with its answers;
    ``fail`` of one that cannot go on."""

    def __init__(
        self,
        scheduler: Scheduler,
        counters: Counters,
        *,
        make_choice: Callable[[Request, int], tuple[ChoiceSampler, ChoiceStream]],
        end: Callable[[Request, list[Choice]], None],
        fail: Callable[[Request, BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._make_choice = make_choice
        self._end = end
        self._fail = fail

    def begin(self, request: Request) -> None:
        """Let ``request``, of which the first sequence is there, be a search if it asks for one."""
        params = request.params
        if params.beams is not None:
            (first,) = request.sequences
            search = BeamSearch(
                params.beams, max_tokens=request.max_tokens, ending=first.output.ending
            )
            request.beams = request.stream.beams = BeamGroup(search, [first])

    def take(
        self, logits: torch.Tensor, rows: list[tuple[int, Sequence]], works: list[Work]
    ) -> None:
        """Make a step with each request whose beams are all computed now.

        ``rows`` says where in ``logits`` the next token of which beam is; ``works`` are the step's.
        """
        by_request: dict[Request, list[tuple[int, Sequence]]] = {}
        for row, seq in rows:
            by_request.setdefault(seq.request, []).append((row, seq))
        for request, mine in by_request.items():
            group = request.beams
            assert group is not None
            group.note_copies([work for work in works if work.seq.request is request])
            fault = self._look(logits, request, group, mine)
            if fault is not None:
                self._fail(request, fault)
            elif group.asleep:
                self._scheduler.wake(request)
            elif group.ready:
                self._advance(request, group)

    def _look(
        self,
        logits: torch.Tensor,
        request: Request,
        group: BeamGroup,
        rows: list[tuple[int, Sequence]],
    ) -> RadixKVError | None:
        """Find what may come next after some beams; return why that cannot be done."""
        search, params = group.search, request.params
        going_on = logits.shape[1] - len(search.ending)
        if going_on < search.width:
            return InvalidRequest(
                f"beam_width is {search.width}, and only {going_on} tokens do not end an answer",
                param="beam_width",
            )
        ranks = {seq: rank for rank, seq in enumerate(group.ranked)}
        found = find_candidates(
            logits[[row for row, _ in rows]],
            [search.running[ranks[seq]].total for _, seq in rows],
            min(search.num_candidates, logits.shape[1]),
            banned=search.ending if search.num_tokens < params.min_tokens else (),
            num_top=params.logprobs,
        )
        for (_, seq), candidates in zip(rows, found, strict=True):
            if not isinstance(candidates, Candidates):
                return RadixKVError(candidates)
            group.found[seq] = candidates
        return None

    def _advance(self, request: Request, group: BeamGroup) -> None:
        first_step = not group.num_steps
        if first_step and request.on_prompt is not None:
            request.on_prompt(request.sequences[0])
        group.num_steps += 1
        step = group.search.advance(group.take_found())
        self._counters.note_generated(request, len(step.parents) + len(step.ended))
        best = group.search.best(request.params.n) if group.search.done else None
        for rank, ended in step.ended:
            if best is None or ended in best:
                group.ranked[rank].publish(tail=rank not in step.parents)
        if best is not None:
            self._finish(request)
            choices = [self._choice(request, i, answer) for i, answer in enumerate(best)]
            request.completion_tokens = sum(answer.trail.length for answer in best)
            self._end(request, choices)
            return
        if first_step:
            (first,) = request.sequences
            born = [self._born(first, index) for index in range(1, group.width)]
            self._scheduler.fork(request, born)
            group.ranked = [first, *born]
        else:
            for dead, parent in group.place(step.parents):
                move(dead, parent)
        for seq, beam in zip(group.ranked, group.search.running, strict=True):
            assert beam.trail is not None
            seq.append(beam.trail.token.token_id)

    def _finish(self, request: Request) -> None:
        """Let the beams go, and the prompt to its last token be found by others as ever."""
        first, *others = request.sequences
        for seq in others:
            self._scheduler.finish(seq, publish=False)
        assert first.table is not None
        first.table.truncate(len(request.prompt_ids))
        self._scheduler.finish(first)

    def _born(self, first: Sequence, index: int) -> Sequence:
        return Sequence(
            first.request,
            index,
            first.sampler,
            first.output,
            tokens=first.tokens.copy(),
            ids=first.ids.copy(),
        )

    def _choice(self, request: Request, index: int, answer: Finished) -> Choice:
        """Say an answer, as if its tokens had been drawn one after the other."""
        output = self._make_choice(request, index)[1]
        for token in answer.trail.tokens():
            output.push(token)
        return replace(
            output.choice(),
            cumulative_logprob=float(answer.total),
            score=float(answer.score),
        )
