"""Log-probabilities as callers see them; knows logits and token names, nothing of sampling.

They are the model's own: log-softmax of raw logits, before temperature, penalties and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.drawing import log_total
from radixkv.service.engine.params import TokenLogprob
from radixkv.service.engine.sampling import SampledToken

_ROWS_AT_ONCE = 32  # bounds what a chunk of prefill needs on top of its logits


def token_logprob(token: SampledToken, name: Callable[[int], bytes]) -> TokenLogprob:
    """Name the tokens of ``token``, which must carry its log-probability."""
    assert token.logprob is not None, "the sampler was not asked for log-probabilities"
    raw = name(token.token_id)
    return TokenLogprob(
        token_id=token.token_id,
        token=_text(raw),
        token_bytes=raw,
        logprob=token.logprob,
        top=tuple((i, _text(name(i)), name(i), logprob) for i, logprob in token.top),
    )


class PromptLogprobs:
    """The log-probability of each prompt token given those before it, from logits in any chunks.

    Keeps ``1 + 2k`` numbers a token and no logits. ``num_done`` positions have been read; a chunk
    may start before that (a prompt computed again), never after.
    """

    def __init__(self, prompt_ids: Sequence[int], k: int, token_text: TokenText) -> None:
        self._ids = np.asarray(prompt_ids, dtype=np.int64)
        self._k = k
        self._token_text = token_text
        self._wanted = max(0, len(self._ids) - 1)  # the last position tells of the answer
        self._own = np.zeros(self._wanted, np.float32)
        self._top_ids = np.zeros((self._wanted, 0), np.int32)
        self._top = np.zeros((self._wanted, 0), np.float32)
        self.num_done = 0

    @property
    def complete(self) -> bool:
        """Whether the logits of all positions that tell of a prompt token have been read."""
        return self.num_done == self._wanted

    @torch.inference_mode()
    def add(self, start: int, logits: torch.Tensor) -> None:
        """Read the logits ``[n, V]`` of prompt positions [start, start + n).

        Row ``i`` tells of token ``start + i + 1``; rows beyond the prompt's last but one token,
        and rows read before, are passed over.
        """
        if self.complete:
            return
        assert 0 <= start <= self.num_done, "prompt logits must come without gaps"
        end = min(start + len(logits), self._wanted)
        if not self._k_known and end > self.num_done:
            self._make_room(logits.shape[1])
        for at in range(self.num_done, end, _ROWS_AT_ONCE):
            upto = min(at + _ROWS_AT_ONCE, end)
            self._read(at, logits[at - start : upto - start])
        self.num_done = max(self.num_done, end)

    def result(self) -> tuple[TokenLogprob | None, ...]:
        """Return one entry a prompt token; the first is None, since nothing precedes it."""
        assert self.complete, "prompt logits are missing"
        name = self._token_text.token_bytes
        entries: list[TokenLogprob | None] = [None] * min(1, len(self._ids))
        own, top_ids, top = self._own.tolist(), self._top_ids.tolist(), self._top.tolist()
        for i, token_id in enumerate(self._ids[1:].tolist()):
            best = tuple(zip(top_ids[i], top[i], strict=True))
            entries.append(token_logprob(SampledToken(token_id, own[i], best), name))
        return tuple(entries)

    @property
    def _k_known(self) -> bool:
        return self._top.shape[1] > 0 or self._k == 0

    def _make_room(self, vocab_size: int) -> None:
        shape = (self._wanted, min(self._k, vocab_size))
        self._top_ids, self._top = np.zeros(shape, np.int32), np.zeros(shape, np.float32)

    def _read(self, at: int, logits: torch.Tensor) -> None:
        rows = slice(at, at + len(logits))
        logits = logits.float()
        norm = log_total(logits)
        told = torch.from_numpy(self._ids[at + 1 : at + 1 + len(logits)]).to(logits.device)
        self._own[rows] = (logits.gather(1, told[:, None]) - norm)[:, 0].cpu().numpy()
        if self._top.shape[1]:
            best = logits.topk(self._top.shape[1], dim=1)
            self._top_ids[rows] = best.indices.cpu().numpy()
            self._top[rows] = (best.values - norm).cpu().numpy()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
