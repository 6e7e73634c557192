"""What one forward pass computes, in numbers; knows nothing of requests, models or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from radixkv.service.engine.adapters import Adapter


@dataclass(slots=True)
class StepBatch:
    """The ragged rows of one step: S sequences, T new tokens in all, packed one after another.

    Row s owns the next ``query_lens[s]`` tokens of ``token_ids``; they are the last of its
    ``kv_lens[s]`` tokens, so its first new token stands at position kv_lens[s] - query_lens[s].

        token_ids   a a a | b | c c         query_lens 3 1 2
        positions   4 5 6 | 9 | 0 1         kv_lens    7 10 2
    """

    token_ids: NDArray[np.int64]
    """[T]"""
    query_lens: NDArray[np.int32]
    """[S], each 1 or more"""
    kv_lens: NDArray[np.int32]
    """[S], tokens of the sequence once this step is done"""
    block_tables: NDArray[np.int32]
    """[S, M] block ids in logical order, padded with 0"""
    copies: Sequence[tuple[int, int, int]] = field(default_factory=tuple)
    """(source block, target block, valid tokens), done before anything is written"""
    logit_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """[R] rows of T whose logits are wanted, in the order they are wanted"""
    adapters: Sequence[Adapter | None] = ()
    """[S] what is applied to the tokens of each sequence; empty where nothing is to any. Sequences
    of one adapter that follow one another are computed together."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens that this step computes."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """S, the sequences that take part."""
        return len(self.query_lens)
