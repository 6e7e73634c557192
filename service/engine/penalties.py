"""Change single logits before a draw: bias, penalties, tokens not allowed yet.

Knows which tokens one choice has seen; nothing of temperatures or draws. Order of the changes:
bias, repetition penalty, frequency and presence penalties, then the mask, as in transformers and
vLLM. They touch a few tokens a row, so a row costs O(distinct tokens seen), not O(vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from radixkv.service.engine.params import SamplingParams

_NONE = np.empty(0, np.int64)


class TokenCounts:
    """How often each token was added; ``ids`` and ``counts`` are views that the next add ends."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, ids: np.ndarray = _NONE) -> None:
        """Start with each of the distinct ``ids`` counted once."""
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}
        self._ids = ids.astype(np.int64)
        self._counts = np.ones(len(ids), np.float32)

    def add(self, token: int) -> None:
        """Count ``token`` once more; O(1) amortised."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            more = max(32, slot)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1.0

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens, int64."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of ``ids`` was added, float32."""
        return self._counts[: len(self._slots)]


class LogitEdits:
    """The changes that one choice wants, and the tokens it has seen so far."""

    __slots__ = ("banned_early", "bias", "generated", "min_tokens", "num_tokens", "params", "seen")

    def __init__(
        self, params: SamplingParams, prompt_ids: np.ndarray, eos_token_ids: Iterable[int]
    ) -> None:
        """``prompt_ids`` are the prompt's distinct tokens (read for the repetition penalty)."""
        self.params = params
        self.num_tokens = 0
        self.min_tokens = params.min_tokens
        early = set(params.stop_token_ids)
        if not params.ignore_eos:
            early.update(eos_token_ids)
        self.banned_early = np.array(sorted(early), np.int64)
        self.bias = (
            np.array(list(params.logit_bias.keys()), np.int64),
            np.array(list(params.logit_bias.values()), np.float32),
        )
        repetition = params.repetition_penalty != 1.0
        counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.seen = TokenCounts(prompt_ids) if repetition else None
        self.generated = TokenCounts() if counted else None

    @property
    def active(self) -> bool:
        """Whether the next draw's logits are changed at all."""
        return bool(
            self.seen is not None
            or self.generated is not None
            or len(self.bias[0])
            or (self.num_tokens < self.min_tokens and len(self.banned_early))
        )

    def record(self, token: int) -> None:
        """Take note of a token drawn."""
        self.num_tokens += 1
        if self.seen is not None:
            self.seen.add(token)
        if self.generated is not None:
            self.generated.add(token)


Part = tuple[np.ndarray, ...]
"""Token ids and, for each of them, the numbers that its change needs."""


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> None:
    """Change ``logits [R, V]`` in place: ``edits`` are (row, what it wants), each row once."""
    for choose, change in (
        (_bias, lambda x, bias: x + bias),
        (_repetition, lambda x, penalty: torch.where(x > 0, x / penalty, x * penalty)),
        (_counted, lambda x, penalty: x - penalty),
        (_banned, lambda x, bias: x + bias),
    ):
        _change(logits, [(row, choose(e)) for row, e in edits], change)


def _bias(edits: LogitEdits) -> Part | None:
    return edits.bias if len(edits.bias[0]) else None


def _repetition(edits: LogitEdits) -> Part | None:
    if edits.seen is None:
        return None
    ids = edits.seen.ids
    return ids, np.full(len(ids), edits.params.repetition_penalty, np.float32)


def _counted(edits: LogitEdits) -> Part | None:
    if edits.generated is None:
        return None
    p, counts = edits.params, edits.generated.counts
    return edits.generated.ids, counts * np.float32(p.frequency_penalty) + np.float32(
        p.presence_penalty
    )


def _banned(edits: LogitEdits) -> Part | None:
    if edits.num_tokens >= edits.min_tokens or not len(edits.banned_early):
        return None
    return edits.banned_early, np.full(len(edits.banned_early), -np.inf, np.float32)


def _change(
    logits: torch.Tensor,
    parts: list[tuple[int, Part | None]],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the logits that ``parts`` name by ``change(logit, number)``, all rows at once."""
    wanted = [(row, part) for row, part in parts if part is not None and len(part[0])]
    if not wanted:
        return
    lengths = [len(part[0]) for _, part in wanted]
    rows = torch.from_numpy(np.repeat([row for row, _ in wanted], lengths)).to(logits.device)
    ids, numbers = (
        torch.from_numpy(np.concatenate([part[i] for _, part in wanted])).to(logits.device)
        for i in (0, 1)
    )
    logits[rows, ids] = change(logits[rows, ids], numbers)
