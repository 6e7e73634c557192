"""Draw from the likeliest tokens that top-k, top-p and min-p leave; knows scores, not requests.

Tokens are ranked by score, of equal ones the lowest id first; every cut keeps a head of that
ranking, and all of them together the shortest head. The definitions are those of transformers:
top-k keeps all that are level with the k-th; top-p keeps the shortest head with at least that share
of what top-k left; min-p keeps what has at least that share of the best.
A draw walks down the head until a uniform number's share of it is used up.

``draw_sorted`` sorts whole rows, on any device. ``draw_bucketed`` does the same on the host, and
sorts next to nothing: it puts tokens into buckets by score and ranks those where a cut or draw is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_PER_NAT = 128  # buckets for each factor of e in probability
_NUM_BUCKETS = 4096  # so the last one takes all that is 32 nats or more below the best


@dataclass(frozen=True, slots=True)
class Cuts:
    """What each row asks for: NumPy arrays ``[R]``."""

    top_k: np.ndarray
    """0 keeps every token."""
    top_p: np.ndarray
    """1 keeps every token."""
    min_p: np.ndarray
    """0 keeps every token."""

    def any(self) -> np.ndarray:
        """Return which rows ask for a cut at all, bool ``[R]``."""
        asked: np.ndarray = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return asked

    def take(self, rows: np.ndarray) -> Cuts:
        """Return those of ``rows``, in that order."""
        return Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw_sorted(scores: torch.Tensor, cuts: Cuts, uniforms: np.ndarray) -> np.ndarray:
    """Draw a token a row of ``scores [R, V]``, whose maxima are 0; returns ids int64 ``[R]``."""
    vocab, device = scores.shape[1], scores.device
    best, order = scores.sort(dim=1, descending=True, stable=True)
    mass = best.double().exp()
    upto = mass.cumsum(1)
    k = torch.from_numpy(cuts.top_k).to(device)[:, None]
    p = torch.from_numpy(cuts.top_p).to(device)[:, None]
    m = torch.from_numpy(cuts.min_p).to(device)[:, None]

    kth = best.gather(1, (k - 1).clamp(0, vocab - 1))
    kept = torch.where(k > 0, (best >= kth).sum(1, keepdim=True), vocab)
    share = p * upto.gather(1, kept - 1)
    kept = torch.where(p < 1.0, torch.minimum(kept, (upto - mass < share).sum(1, True)), kept)
    kept = torch.where(m > 0.0, torch.minimum(kept, (mass >= m).sum(1, True)), kept)

    end = upto.gather(1, kept.clamp(min=1) - 1)
    target = torch.from_numpy(uniforms).to(device)[:, None] * end
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    ids: np.ndarray = (
        order.gather(1, torch.searchsorted(upto, target, right=True))[:, 0].cpu().numpy()
    )
    return ids


def draw_bucketed(scores: torch.Tensor, cuts: Cuts, uniforms: np.ndarray) -> np.ndarray:
    """Do as ``draw_sorted``, for scores on the host."""
    ids = np.empty(len(scores), np.int64)
    asked = zip(cuts.top_k.tolist(), cuts.top_p.tolist(), cuts.min_p.tolist(), strict=True)
    for row, (top_k, top_p, min_p) in enumerate(asked):
        ranking = _Ranking(*_best(scores[row], top_k))
        head = ranking.everything()
        if top_p < 1.0:
            head = min(head, ranking.head_of_mass(top_p * ranking.mass_of(head)))
        if min_p > 0.0:
            head = min(head, ranking.head_above(min_p))
        ids[row] = ranking.draw(head, float(uniforms[row]))
    return ids


def _best(scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, np.ndarray | None]:
    """Return the scores that top-k keeps and their tokens; None stands for all of them."""
    if not 0 < top_k < len(scores):
        return scores, None
    table = scores.numpy()
    kth = np.partition(table, len(table) - top_k)[len(table) - top_k]
    tokens = np.flatnonzero(table >= kth)
    return torch.from_numpy(table[tokens]), tokens


_Head = tuple[int, int]
"""(bucket, n): all tokens of the buckets before, and the first ``n`` of this one."""


class _Ranking:
    """The tokens of one row in order of score, sorted only where somebody looks."""

    __slots__ = ("_buckets", "_mass", "_opened", "_scores", "_tokens", "_upto")

    def __init__(self, scores: torch.Tensor, tokens: np.ndarray | None) -> None:
        """``tokens`` are the scores' token ids, ascending; None if the scores are of all tokens."""
        self._scores, self._tokens = scores.numpy(), tokens
        self._mass = scores.exp().numpy()
        self._buckets = scores.mul(-_PER_NAT).clamp_(max=_NUM_BUCKETS - 1).to(torch.int16).numpy()
        self._upto = np.bincount(self._buckets, self._mass, _NUM_BUCKETS).cumsum()
        self._opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def everything(self) -> _Head:
        return _NUM_BUCKETS, 0

    def head_of_mass(self, mass: float) -> _Head:
        """Return the shortest head with at least ``mass``."""
        bucket = int(self._upto.searchsorted(mass))
        if bucket == _NUM_BUCKETS:
            return self.everything()
        _, within = self._open(bucket)
        return bucket, min(int(within.searchsorted(mass - self._before(bucket))) + 1, len(within))

    def head_above(self, mass: float) -> _Head:
        """Return the head of tokens that have at least ``mass`` each."""
        bucket = min(int(-np.log(mass) * _PER_NAT), _NUM_BUCKETS - 1)
        ids, _ = self._open(bucket)
        return bucket, int(np.count_nonzero(self._mass[ids] >= mass))

    def mass_of(self, head: _Head) -> float:
        bucket, count = head
        within = float(self._open(bucket)[1][count - 1]) if count else 0.0
        return self._before(bucket) + within

    def draw(self, head: _Head, uniform: float) -> int:
        """Return the token at ``uniform`` in [0, 1) of the head's mass; never one without mass."""
        target = uniform * self.mass_of(head)
        bucket = min(int(self._upto.searchsorted(target, side="right")), head[0])
        ids, within = self._open(bucket)
        if bucket == head[0]:
            within = within[: head[1]]
        rest = min(target - self._before(bucket), float(np.nextafter(within[-1], 0.0)))
        place = int(ids[within.searchsorted(rest, side="right")])
        return place if self._tokens is None else int(self._tokens[place])

    def _before(self, bucket: int) -> float:
        return float(self._upto[bucket - 1]) if bucket else 0.0

    def _open(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where a bucket's scores are, ranked, and their mass added up."""
        found = self._opened.get(bucket)
        if found is None:
            ids = np.flatnonzero(self._buckets == bucket)
            ids = ids[np.argsort(-self._scores[ids], kind="stable")]
            found = self._opened[bucket] = ids, self._mass[ids].cumsum(dtype=np.float64)
        return found
