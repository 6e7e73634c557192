"""Beam search over log-probabilities: which beams go on, which are finished, and when it is enough.

Knows tokens and their log-probabilities; nothing of models, blocks or requests. Ids and scores are
those of transformers' ``generate(num_beams=...)``, whose rules are these, a step:

    running beams    width, ranked by the sum of their log-probabilities
    candidates       the best (1 + end tokens, at least 2) * width continuations of all beams
    finished         of the best ``width`` candidates those that end; with what was finished before
                     the best ``width`` of them by score stay
    running again    the best ``width`` candidates that do not end

All sums and scores are float32, as there, so that equal inputs meet equal comparisons.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.drawing import log_total
from radixkv.service.engine.sampling import SampledToken

_WORST = np.float32(-1e9)


@dataclass(frozen=True, slots=True, eq=False)
class Trail:
    """A beam's tokens, the last here and the others in ``before``; beams share beginnings."""

    before: Trail | None
    token: SampledToken
    length: int

    def tokens(self) -> list[SampledToken]:
        """Return all tokens, first to last. O(length)."""
        found: list[SampledToken] = []
        at: Trail | None = self
        while at is not None:
            found.append(at.token)
            at = at.before
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """An answer that goes on. ``total`` is the sum of its tokens' log-probabilities."""

    trail: Trail | None
    total: np.float32


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """An answer that ended, and its score."""

    trail: Trail
    total: np.float32
    score: np.float32


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best continuations of one beam, the best first; [K] each."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    totals: npt.NDArray[np.float32]
    """The beam's total with each."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step made of the running beams, which are named by their ranks before it."""

    parents: tuple[int, ...]
    """Of each beam that runs on, by its new rank; empty when the search is over."""
    ended: tuple[tuple[int, Finished], ...]
    """The answers that ended now and are among the best, with the beams that they continued."""


def find_candidates(
    logits: torch.Tensor,
    totals: Sequence[np.float32],
    count: int,
    *,
    banned: Collection[int] = (),
    num_top: int | None = None,
) -> list[Candidates | str]:
    """Return the ``count`` best continuations of each beam, or what is wrong with its logits.

    logits   [R, V] fp32 with V >= count, one row a beam; left unchanged
    totals   [R] sums of log-probabilities so far
    banned   token ids that may not come yet
    num_top  also tell that many of the likeliest tokens of each row
    """
    logits = logits.float()
    peaks = logits.amax(1, keepdim=True)
    # Shifted twice, so that the logarithm is rounded as what it is and not beside a large peak.
    logprobs = logits - peaks
    logprobs -= log_total(logprobs)
    likeliest = logprobs.topk(min(num_top, logits.shape[1]), dim=1) if num_top else None
    if banned:
        logprobs[:, list(banned)] = -torch.inf
    sums = logprobs + torch.tensor(np.array(totals, np.float32), device=logits.device)[:, None]
    best = sums.topk(count, dim=1)
    own = logprobs.gather(1, best.indices).cpu().numpy()
    ids, values = best.indices.cpu().numpy(), best.values.cpu().numpy()
    found: list[Candidates | str] = []
    for row, peak in enumerate(peaks[:, 0].tolist()):
        if not np.isfinite(peak):
            found.append(f"a beam's largest logit is {peak}")
            continue
        top: tuple[tuple[int, float], ...] = ()
        if likeliest is not None:
            names = likeliest.indices[row].tolist()
            top = tuple(zip(names, likeliest.values[row].tolist(), strict=True))
        found.append(Candidates(ids[row], own[row], values[row], top))
    return found


class BeamSearch:
    """One search, step by step, until ``done``."""

    def __init__(self, params: BeamParams, *, max_tokens: int, ending: Collection[int]) -> None:
        """``ending`` are the ids of tokens that end an answer; so do ``max_tokens`` tokens."""
        self.width = params.width
        self.ending = frozenset(ending)
        self.num_candidates = max(2, 1 + len(self.ending)) * params.width
        self.running = [Beam(None, np.float32(0.0))]
        self.finished: list[Finished] = []
        """The best that have ended, the best first; at most ``width``."""
        self.num_tokens = 0
        """Tokens of each running beam."""
        self.done = False
        self._params = params
        self._max_tokens = max_tokens

    def advance(self, found: Sequence[Candidates]) -> Step:
        """Take the candidates of the running beams, in their order, and choose.

        Of equal sums that of the beam of lower rank goes first. O(width * candidates).
        """
        assert len(found) == len(self.running) and not self.done
        self.num_tokens += 1
        totals = np.concatenate([c.totals for c in found])
        order = np.argsort(-totals, kind="stable")[: self.num_candidates]
        sizes = [len(c.ids) for c in found]
        parents = np.repeat(np.arange(len(found)), sizes)[order]
        places = (order - np.repeat(np.cumsum(sizes) - sizes, sizes)[order]).tolist()
        totals = totals[order]
        last = self.num_tokens >= self._max_tokens
        ends = [
            last or int(found[parent].ids[place]) in self.ending
            for parent, place in zip(parents.tolist(), places, strict=True)
        ]

        def trail(j: int) -> Trail:
            parent, place = int(parents[j]), places[j]
            some = found[parent]
            token = SampledToken(int(some.ids[place]), float(some.logprobs[place]), some.top)
            return Trail(self.running[parent].trail, token, self.num_tokens)

        ended = [
            (int(parents[j]), self._finish(trail(j), totals[j]))
            for j in range(min(self.width, len(order)))
            if ends[j]
        ]
        if ended:
            both = self.finished + [finished for _, finished in ended]
            self.finished = sorted(both, key=lambda f: -f.score)[: self.width]
            kept = set(map(id, self.finished))
            ended = [(parent, finished) for parent, finished in ended if id(finished) in kept]
        on = [j for j in range(len(order)) if not ends[j]][: self.width]
        self.done = not on or not self._can_improve(totals[on[0]])
        if self.done:
            return Step((), tuple(ended))
        assert len(on) == self.width, "each beam has more candidates than ways to end"
        self.running = [Beam(trail(j), totals[j]) for j in on]
        return Step(tuple(int(parents[j]) for j in on), tuple(ended))

    def best(self, n: int) -> list[Finished]:
        """Return the ``n`` best answers of a search that is done, the best first."""
        assert self.done, "the search goes on"
        return self.finished[:n]

    def _finish(self, trail: Trail, total: np.float32) -> Finished:
        return Finished(trail, total, self._score(total, trail.length))

    def _score(self, total: np.float32, length: int) -> np.float32:
        return np.float32(total / np.float32(length**self._params.length_penalty))

    def _can_improve(self, best: np.float32) -> bool:
        """Tell whether the running beams, of which the best has this total, may be of use still."""
        params = self._params
        full = len(self.finished) == self.width
        if full and (params.early_stopping is True or self.width == 1):
            return False  # a single beam is greedy, and greedy means the first end
        length = self.num_tokens
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_tokens
        worst = self.finished[-1].score if full else _WORST
        return bool(self._score(best, length) > worst)
