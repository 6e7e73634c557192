"""Draw one token a row from a batch of logits; knows tensors and numbers, nothing of requests.

A row is drawn with one uniform number, by walking the cumulated probabilities of the tokens kept:
in vocabulary order when nothing is cut, from the likeliest down when something is. Which tokens are
kept is transformers' definition (temperature, then top-k, top-p, min-p). On the host NumPy is used
for what it does several times faster than torch (argmax, partition, sort); elsewhere torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WINDOW = 1024
"""Likeliest tokens that are sorted first; a row whose cut lies beyond them is sorted whole."""
_BLOCK = 256
_COLDEST = 1e-6  # below this a temperature is greedy in all but name, and would overflow fp32


@dataclass(frozen=True, slots=True)
class Cuts:
    """What each row asks for: NumPy arrays ``[R]``."""

    temperature: np.ndarray
    """Above 0."""
    top_k: np.ndarray
    """0 keeps every token."""
    top_p: np.ndarray
    min_p: np.ndarray

    def take(self, rows: np.ndarray) -> Cuts:
        """Return those of ``rows``, in that order."""
        return Cuts(*(a[rows] for a in (self.temperature, self.top_k, self.top_p, self.min_p)))


def argmax(logits: torch.Tensor, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest token of each of ``rows`` and its logit; a NaN counts as the largest.

    Of equal logits the lowest token id wins on the host.
    """
    whole = len(rows) == len(logits)
    if logits.is_cpu:
        table = logits.numpy()
        ids = table.argmax(1) if whole else np.array([table[r].argmax() for r in rows], np.int64)
        return ids, table[rows, ids]
    chosen = logits if whole else logits[rows]
    best = chosen.argmax(1, keepdim=True)
    return best[:, 0].cpu().numpy(), chosen.gather(1, best)[:, 0].cpu().numpy()


def row_max(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row ``[R, 1]``; NaN if the row has one."""
    return logits.amax(1, keepdim=True)


def draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    cuts: Cuts,
    uniforms: np.ndarray,
    window: int = WINDOW,
) -> np.ndarray:
    """Draw a token for each row of ``logits [R, V]``; overwrites ``logits``.

    peaks     [R, 1] the finite maximum of each row
    uniforms  [R] float64 in [0, 1)
    return    [R] int64 token ids
    """
    warmth = torch.from_numpy(np.maximum(cuts.temperature, _COLDEST).astype(np.float32))
    scores = logits.sub_(peaks).div_(warmth[:, None].to(logits.device))
    cut = (cuts.top_k > 0) | (cuts.top_p < 1.0) | (cuts.min_p > 0.0)
    if cut.all():
        return _draw_cut(scores, cuts, uniforms, window)
    if not cut.any():
        return _draw_whole(scores, uniforms)
    ids = np.empty(len(cut), np.int64)
    some, rest = np.flatnonzero(cut), np.flatnonzero(~cut)
    ids[some] = _draw_cut(_rows(scores, some), cuts.take(some), uniforms[some], window)
    ids[rest] = _draw_whole(_rows(scores, rest), uniforms[rest])
    return ids


def _draw_whole(scores: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """Draw from all tokens, in two steps (a block of the vocabulary, a token in it).

    Sums of blocks are added up in float64, so no token drowns in a long fp32 sum.
    """
    mass = scores.exp_()
    vocab = mass.shape[1]
    whole = vocab - vocab % _BLOCK
    blocks = torch.unflatten(mass[:, :whole], 1, (whole // _BLOCK, _BLOCK)).sum(2)
    if whole < vocab:
        blocks = torch.cat([blocks, mass[:, whole:].sum(1, keepdim=True)], 1)
    upto = blocks.double().cumsum(1)
    target = torch.from_numpy(uniforms).to(mass.device)[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    target = target - torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    places = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(1, places.clamp(max=vocab - 1)).double() * (places < vocab)
    token = block * _BLOCK + _first_above(inside.cumsum(1), target)
    return _host(token[:, 0])


def _first_above(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first place ``[R, 1]`` whose cumulated mass exceeds target: never a mass of 0."""
    below = torch.nextafter(upto[:, -1:], upto.new_zeros(()))
    return torch.searchsorted(upto, torch.minimum(target, below), right=True)


def _draw_cut(scores: torch.Tensor, cuts: Cuts, uniforms: np.ndarray, window: int) -> np.ndarray:
    """Draw from what top-k, top-p and min-p leave. Rows of ``scores`` have their maximum at 0."""
    window = min(window, scores.shape[1])
    best = _descending(scores, window)
    num_kept, known = _num_kept(scores, best, cuts)
    upto = best.double().exp().cumsum(1)
    end = upto.gather(1, num_kept - 1)
    target = torch.minimum(
        torch.from_numpy(uniforms).to(scores.device)[:, None] * end,
        torch.nextafter(end, end.new_zeros(())),
    )
    rank = torch.searchsorted(upto, target, right=True)
    value = best.gather(1, rank)
    twin = rank - (best > value).sum(1, keepdim=True)  # how many equal ones come before it
    ids = _locate(scores, value, twin)
    far = np.flatnonzero(~known.cpu().numpy())
    if far.size:
        whole = scores.shape[1]
        ids[far] = _draw_cut(_rows(scores, far), cuts.take(far), uniforms[far], whole)
    return ids


def _num_kept(
    scores: torch.Tensor, best: torch.Tensor, cuts: Cuts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of the likeliest tokens are kept ``[R, 1]``, and where that is known ``[R]``.

    It is not known where a cut may lie beyond the window ``best [R, W]`` (descending scores).
    Every cut keeps a head of that order, so the shortest head is what they leave together.
    """
    device, window = scores.device, best.shape[1]
    everything = window == scores.shape[1]
    mass = best.double().exp()
    k = torch.from_numpy(cuts.top_k.astype(np.int64)).to(device)[:, None]
    p = torch.from_numpy(cuts.top_p.astype(np.float64)).to(device)[:, None]
    m = torch.from_numpy(cuts.min_p.astype(np.float64)).to(device)[:, None]

    # top-k keeps all that are level with the k-th, so the window must show something below it
    kth = best.gather(1, (k - 1).clamp(0, window - 1))
    by_k, wants_k = best >= kth, k > 0
    known_k = wants_k & (everything | ((k < window) & (best[:, -1:] < kth)))
    num_k = torch.where(wants_k, by_k.sum(1, keepdim=True), window)

    wants_p = p < 1.0
    total = (mass * by_k).sum(1, keepdim=True)
    open_p = np.flatnonzero((cuts.top_k == 0) & (cuts.top_p < 1.0))
    if open_p.size:  # only here the whole row matters
        total[open_p] = _rows(scores, open_p).exp().sum(1, keepdim=True).double()
    upto = mass.cumsum(1)
    num_p = torch.where(wants_p, (upto - mass < p * total).sum(1, keepdim=True), window)
    known_p = wants_p & torch.where(wants_k, known_k, upto[:, -1:] >= p * total)

    num_m = torch.where(m > 0, (mass >= m).sum(1, keepdim=True), window)
    known = (known_k | known_p | (num_m < window)) & ~(wants_p & wants_k & ~known_k)
    kept = torch.minimum(torch.minimum(num_k, num_p), num_m).clamp(min=1)
    return kept, known[:, 0] | everything


def _descending(scores: torch.Tensor, window: int) -> torch.Tensor:
    """Return the ``window`` largest scores of each row, largest first."""
    if not scores.is_cpu:
        return scores.topk(window, dim=1).values
    table = scores.numpy()
    if window < table.shape[1]:
        table = np.partition(table, table.shape[1] - window, axis=1)[:, -window:]
    return torch.from_numpy(np.sort(table, axis=1)[:, ::-1].copy())


def _locate(scores: torch.Tensor, value: torch.Tensor, twin: torch.Tensor) -> np.ndarray:
    """Return the token whose score is ``value``; of equal ones the ``twin``-th from the highest id.

    The highest id first is the order in which transformers' top-p keeps equal scores.
    """
    if scores.is_cpu:
        rows = zip(scores.numpy(), value[:, 0].numpy(), twin[:, 0].tolist(), strict=True)
        return np.array([np.flatnonzero(row == x)[-1 - t] for row, x, t in rows], np.int64)
    level = scores == value
    order = level.flip(1).cumsum(1)
    place = ((order == twin + 1) & level.flip(1)).int().argmax(1)
    return _host(scores.shape[1] - 1 - place)


def _rows(scores: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    if len(rows) == len(scores):
        return scores
    return scores[torch.from_numpy(rows).to(scores.device)]


def _host(ids: torch.Tensor) -> np.ndarray:
    found: np.ndarray = ids.cpu().numpy()
    return found
