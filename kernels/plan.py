"""Turns the block tables of one step into the index vectors that every layer reuses.

Knows sequences as (new tokens, valid tokens, block ids); nothing of the tree that shared the
blocks, of heads or of values.

    sequence s of a step    |<-------------- kv_lens[s] -------------->|
                            | already in the pool |  query_lens[s] new |
    positions               0                     ^ first new token    kv_lens[s]
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.checks import expect

T = TypeVar("T")
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionPlan:
    """The index work of one step, done once; read-only, and a copy of what it was built from.

    Sequences are ragged and packed: the new tokens of sequence ``s`` are the rows
    ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]`` of q, k, v and the output.
    """

    block_size: int
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_kv_len: int

    # On the device of the pool.
    cu_seqlens_q: torch.Tensor  # int32 [S + 1]
    kv_lens: torch.Tensor  # int32 [S], valid tokens after this step's write
    block_tables: torch.Tensor  # int32 [S, M], unused entries are never read
    slots: torch.Tensor  # int64 [T], where write_kv puts each new token
    positions: torch.Tensor  # int64 [T], each new token's place in its sequence

    # The same on the host, for whoever decides how to launch.
    host_query_lens: Int32
    host_kv_lens: Int32
    host_block_tables: Int32
    host_cu_seqlens_q: Int32
    decode_seqs: Int64  # sequences with exactly one new token, ascending
    prefill_seqs: Int64  # sequences with more than one, ascending

    share: bool = True  # whether keys in common may be read once for several sequences

    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        query_lens: npt.ArrayLike,
        kv_lens: npt.ArrayLike,
        block_tables: npt.ArrayLike | Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        share: bool = True,
    ) -> "AttentionPlan":
        """Plan a step. O(new tokens + table entries), no device synchronisation.

        query_lens    [S] new tokens of each sequence, may be 0
        kv_lens       [S] valid tokens of each sequence once the new ones are written
        block_tables  [S, M] physical block of each logical one; entries past the length are padding
        share         False: every sequence reads all its keys by itself (flat attention)
        """
        queries = np.array(query_lens, dtype=np.int32).reshape(-1)
        lengths = np.array(kv_lens, dtype=np.int32).reshape(-1)
        tables = np.array(block_tables, dtype=np.int32)
        num_seqs = len(queries)
        if tables.ndim != 2:
            tables = tables.reshape(num_seqs, -1 if num_seqs else 0)
        expect(block_size > 0, "block_size", "positive", block_size)
        expect(len(lengths) == num_seqs, "kv_lens", f"of length {num_seqs}", len(lengths))
        expect(len(tables) == num_seqs, "block_tables", f"of {num_seqs} rows", len(tables))
        expect(bool((queries >= 0).all()), "query_lens", "at least 0", query_lens)
        expect(bool((lengths >= queries).all()), "kv_lens", "at least query_lens", kv_lens)
        max_kv_len = int(lengths.max(initial=0))
        width = -(-max_kv_len // block_size)
        expect(tables.shape[1] >= width, "block_tables", f"{width} wide", tables.shape)

        ends = np.cumsum(queries, dtype=np.int64)
        num_tokens = int(ends[-1]) if num_seqs else 0
        cu_seqlens = np.zeros(num_seqs + 1, dtype=np.int32)
        cu_seqlens[1:] = ends
        # Row t of sequence s is position t - end[s] + kv_len[s].
        positions = np.arange(num_tokens) + np.repeat(lengths - ends, queries)
        rows = np.repeat(np.arange(num_seqs), queries)
        logical, offset = np.divmod(positions, block_size)
        slots = tables[rows, logical].astype(np.int64) * block_size + offset

        def put(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            block_size=block_size,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=int(queries.max(initial=0)),
            max_kv_len=max_kv_len,
            cu_seqlens_q=put(cu_seqlens),
            kv_lens=put(lengths),
            block_tables=put(tables),
            slots=put(slots),
            positions=put(positions),
            host_query_lens=queries,
            host_kv_lens=lengths,
            host_block_tables=tables,
            host_cu_seqlens_q=cu_seqlens,
            decode_seqs=np.flatnonzero(queries == 1),
            prefill_seqs=np.flatnonzero(queries > 1),
            share=share,
        )

    @property
    def device(self) -> torch.device:
        return self.kv_lens.device

    def slots_of(self, seq: int, start: int, stop: int) -> Int64:
        """Slots of the positions ``start : stop`` of one sequence, on the host."""
        size = self.block_size
        first = start // size
        blocks = self.host_block_tables[seq, first : -(-stop // size)].astype(np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return slots[start - first * size : stop - first * size]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Make what a backend derives from the plan at its first layer; later layers reuse it."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(T, self._memo[key])
