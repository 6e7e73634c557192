"""Draw one token a row from a batch of logits; knows tensors and numbers, nothing of requests.

A row is drawn with one uniform number: in vocabulary order if all tokens are kept (here), down from
the likeliest if some are cut (nucleus.py).
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv.service.engine.nucleus import Cuts, draw_bucketed, draw_sorted

_BLOCK = 256
_COLDEST = 1e-6  # below this a temperature is greedy in all but name, and would overflow fp32


def argmax(logits: torch.Tensor, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest token of each of ``rows`` and its logit; a NaN counts as the largest.

    On the host NumPy does it ten times faster than torch; of equal logits the lowest id wins there.
    """
    whole = len(rows) == len(logits)
    if logits.is_cpu:
        table = logits.numpy()
        ids = table.argmax(1) if whole else np.array([table[r].argmax() for r in rows], np.int64)
        return ids, table[rows, ids]
    chosen = logits if whole else logits[rows]
    best = chosen.argmax(1, keepdim=True)
    return best[:, 0].cpu().numpy(), chosen.gather(1, best)[:, 0].cpu().numpy()


def draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    temperature: np.ndarray,
    cuts: Cuts,
    uniforms: np.ndarray,
) -> np.ndarray:
    """Draw a token for each row of ``logits [R, V]``; overwrites ``logits``.

    peaks        [R, 1] the finite maximum of each row
    temperature  [R] above 0
    uniforms     [R] float64 in [0, 1)
    return       [R] int64 token ids
    """
    warmth = torch.from_numpy(np.maximum(temperature, _COLDEST).astype(np.float32))
    scores = logits.sub_(peaks).div_(warmth[:, None].to(logits.device))
    asked = cuts.any()
    if asked.all():
        return _draw_head(scores, cuts, uniforms)
    if not asked.any():
        return draw_whole(scores, uniforms)
    ids = np.empty(len(asked), np.int64)
    some, rest = np.flatnonzero(asked), np.flatnonzero(~asked)
    ids[some] = _draw_head(scores[some], cuts.take(some), uniforms[some])
    ids[rest] = draw_whole(scores[rest], uniforms[rest])
    return ids


def _draw_head(scores: torch.Tensor, cuts: Cuts, uniforms: np.ndarray) -> np.ndarray:
    if scores.is_cpu:
        return draw_bucketed(scores, cuts, uniforms)
    return draw_sorted(scores, cuts, uniforms)


def draw_whole(scores: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """Draw from all tokens, first a block of the vocabulary, then a token in it.

    Overwrites ``scores``, whose maxima are 0. The sums of blocks are added up in float64, so no
    token drowns in a long fp32 sum.
    """
    mass = scores.exp_()
    vocab = mass.shape[1]
    upto = _upto_blocks(mass)
    target = torch.from_numpy(uniforms).to(mass.device)[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    target = target - torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    places = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inside = mass.gather(1, places.clamp(max=vocab - 1)).double() * (places < vocab)
    token = block * _BLOCK + _first_above(inside.cumsum(1), target)
    ids: np.ndarray = token[:, 0].cpu().numpy()
    return ids


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of exponentials of each row, ``[R, 1]`` fp32.

    As ``logsumexp``, but a row's bits are the same alone and in company: torch splits the sum of a
    single long row among threads, and those of several rows not.
    """
    peaks = logits.amax(1, keepdim=True)
    return peaks + _upto_blocks((logits - peaks).exp_())[:, -1:].log().float()


def _upto_blocks(mass: torch.Tensor) -> torch.Tensor:
    """Add up ``mass [R, V]`` by blocks of the vocabulary: float64 ``[R, blocks]``, cumulated."""
    vocab = mass.shape[1]
    whole = vocab - vocab % _BLOCK
    blocks = torch.unflatten(mass[:, :whole], 1, (whole // _BLOCK, _BLOCK)).sum(2)
    if whole < vocab:
        blocks = torch.cat([blocks, mass[:, whole:].sum(1, keepdim=True)], 1)
    return blocks.double().cumsum(1)


def _first_above(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first place ``[R, 1]`` whose cumulated mass exceeds target: never a mass of 0."""
    end = upto[:, -1:]
    below = torch.nextafter(end, torch.zeros_like(end))
    return torch.searchsorted(upto, torch.minimum(target, below), right=True)
