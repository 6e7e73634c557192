"""Draws steps for the kernel tests: ragged batches over a permuted pool in which whatever must not
be read is NaN."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative, against float64 on the same (rounded) inputs: about two units in the last
place of the result's type, for results of order 1."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of ``paged_attention``, and how to check its answer."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    plan: AttentionPlan
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str) -> torch.Tensor:
        return paged_attention(
            self.q, self.k_pool, self.v_pool, self.plan, backend=backend, **self.options
        )

    def check(self, backend: str) -> None:
        got, want = self.run(backend), self.run("reference")
        assert got.dtype == self.q.dtype and got.shape == self.q.shape
        assert not want.isnan().any(), "the case itself reads poison"
        bound = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def make_case(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    block_size: int = 16,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    permuted: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Build a step; the first ``shared_blocks`` whole blocks are common to all that are that long.

    Poisoned with NaN: blocks in no table (padding entries of the tables name one of them), slots
    past a sequence's length, and what no query sees through the sliding window.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-n // block_size) for n in kv_lens]
    shared = [min(shared_blocks, n // block_size) for n in kv_lens]
    num_shared = max(shared, default=0)
    num_used = num_shared + sum(c - s for c, s in zip(counts, shared, strict=True))
    num_blocks = num_used + 3
    ids = rng.permutation(num_blocks) if permuted else np.arange(num_blocks)
    spare = ids[num_used:]
    tables = np.full((len(kv_lens), max(counts, default=0) + 1), spare[0], dtype=np.int32)
    used = num_shared
    for s, (count, common) in enumerate(zip(counts, shared, strict=True)):
        tables[s, :common] = ids[:common]
        tables[s, common:count] = ids[used : used + count - common]
        used += count - common

    return case_over(
        tables,
        query_lens,
        kv_lens,
        num_blocks,
        block_size=block_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
        seed=seed,
        device=device,
    )


def make_tree_case(
    branches: Sequence[tuple[int, int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    block_size: int = 16,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Build a step whose prompts branch: sequence s begins with ``branches[s] = (parent, blocks)``.

    It names up to that many whole blocks of an earlier sequence's table, as far as both are that
    long and its own new tokens stand behind them. Options and poison as in ``make_case``.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + 3
    ids = rng.permutation(num_blocks)
    tables = np.full((len(kv_lens), max(counts, default=0) + 1), ids[-1], dtype=np.int32)
    used = 0
    for s, ((parent, blocks), count) in enumerate(zip(branches, counts, strict=True)):
        cached = (kv_lens[s] - query_lens[s]) // block_size
        common = min(blocks, cached, kv_lens[parent] // block_size) if s else 0
        tables[s, :common] = tables[parent, :common]
        tables[s, common:count] = ids[used : used + count - common]
        used += count - common
    return case_over(
        tables, query_lens, kv_lens, num_blocks, block_size=block_size, seed=seed, **options
    )


def case_over(
    tables: npt.NDArray[np.int32],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_blocks: int,
    *,
    block_size: int = 16,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Fill a pool for given tables: random where a query sees it, NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    visible = np.zeros((num_blocks, block_size), dtype=bool)
    for s, (n_new, n) in enumerate(zip(query_lens, kv_lens, strict=True)):
        first = 0 if sliding_window is None else max(0, n - n_new - sliding_window + 1)
        for j in range(first if n_new else n, n):
            visible[tables[s, j // block_size], j % block_size] = True
    poison = torch.from_numpy(~visible)[:, :, None, None]
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_pool, v_pool = (
        torch.randn(shape, generator=generator).masked_fill(poison, torch.nan).to(device, dtype)
        for _ in range(2)
    )
    q = torch.randn(sum(query_lens), num_q_heads, head_dim, generator=generator).to(device, dtype)
    options: dict[str, Any] = {"scale": head_dim**-0.5}
    if sliding_window is not None:
        options["sliding_window"] = sliding_window
    if soft_cap is not None:
        options["soft_cap"] = soft_cap
    if sinks:
        options["sinks"] = torch.randn(num_q_heads, generator=generator).to(device)
    if alibi:
        options["alibi_slopes"] = torch.rand(num_q_heads, generator=generator).to(device)
    plan = AttentionPlan.build(query_lens, kv_lens, tables, block_size, device)
    return Case(q, k_pool, v_pool, plan, options)


def random_pool(
    num_blocks: int = 6, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> KVPool:
    """Build a pool of two layers and 3 heads of 8 with every entry different."""
    pool = KVPool.allocate(2, num_blocks, block_size, 3, 8, dtype)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(0)))
    return pool


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Poison what ``torch.empty`` returns: a row that a kernel forgets to write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@st.composite
def _extras(draw: st.DrawFn) -> dict[str, Any]:
    """What a model may ask beyond plain softmax, each of it in a quarter of the cases or so."""
    return {
        "soft_cap": draw(st.sampled_from((None, None, 2.0))),
        "sinks": draw(st.booleans()) and draw(st.booleans()),
        "alibi": draw(st.booleans()) and draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_seqs: int = 5,
    max_cached: int = 70,
    max_new: int = 40,
    head_dims: Sequence[int] = (64, 80, 96, 128, 256),
    block_sizes: Sequence[int] = (1, 2, 3, 16, 32, 100, 256),
) -> Case:
    """Any step: idle, decoding and prefilling sequences, with or without a shared prefix."""
    new = st.one_of(st.just(0), st.just(1), st.just(1), st.integers(2, max_new))
    sequences = draw(
        st.lists(st.tuples(new, st.integers(0, max_cached)), min_size=0, max_size=max_seqs)
    )
    num_kv_heads = draw(st.sampled_from((1, 2, 3)))
    return make_case(
        [n for n, _ in sequences],
        [n + cached for n, cached in sequences],
        block_size=draw(st.sampled_from(block_sizes)),
        num_kv_heads=num_kv_heads,
        num_q_heads=num_kv_heads * draw(st.sampled_from((1, 3, 4, 8))),
        head_dim=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        shared_blocks=draw(st.sampled_from((0, 0, 2))),
        permuted=draw(st.booleans()),
        sliding_window=draw(st.sampled_from((None, None, 1, 7, 33, 1000))),
        **draw(_extras()),
    )


@st.composite
def tree_cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_seqs: int = 6,
    max_kv_len: int = 900,
    max_new: int = 40,
    head_dims: Sequence[int] = (16, 64, 80),
    block_sizes: Sequence[int] = (1, 16, 100, 256),
) -> Case:
    """Steps whose prompts branch off each other at several levels: decoding, prefilling or idle."""
    block_size = draw(st.sampled_from(block_sizes))
    num_seqs = draw(st.integers(2, max_seqs))
    new = [draw(st.sampled_from((0, 1, 1, 1, 1, 2, 7, max_new))) for _ in range(num_seqs)]
    lens = [max(n, draw(st.sampled_from((max_kv_len, 600, 300, 5))) - s) for s, n in enumerate(new)]
    branches = [
        (
            draw(st.integers(0, max(0, s - 1))),
            draw(st.sampled_from((max_kv_len, 560, 300, 30, 0))) // block_size,
        )
        for s in range(num_seqs)
    ]
    num_kv_heads = draw(st.sampled_from((1, 2)))
    return make_tree_case(
        branches,
        new,
        lens,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        num_q_heads=num_kv_heads * draw(st.sampled_from((1, 3, 8))),
        head_dim=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        sliding_window=draw(st.sampled_from((None, None, None, 33, 300, 1000))),
        **draw(_extras()),
    )
