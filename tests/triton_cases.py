"""Draws steps whose sequences branch from each other at several levels, over pools of any type."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.quant import dequantise, quantise
from radixkv.kernels.reference import paged_attention_reference
from radixkv.kernels.tree import CostModel
from tests.kernel_cases import TOLERANCE

SHARE = CostModel(token=1.0)
FLAT = CostModel(token=0.0, step=1.0)
POOLS = (None, torch.int8, torch.float8_e4m3fn)
Tables = npt.NDArray[np.int32]


def tree_tables(
    draw: st.DrawFn, block_size: int, max_seqs: int, max_new: int, max_own: int
) -> tuple[tuple[list[int], list[int]], Tables]:
    """Draw (new tokens, valid tokens) and block tables; some sequences begin as another does."""
    new: list[int] = []
    valid: list[int] = []
    rows: list[list[int]] = []
    fresh = 0
    for s in range(draw(st.integers(0, max_seqs))):
        common = 0
        row: list[int] = []
        if s and draw(st.integers(0, 3)):
            parent = draw(st.integers(0, s - 1))
            common = draw(st.one_of(st.just(valid[parent]), st.integers(0, valid[parent])))
            row = rows[parent][: common // block_size]
            common = len(row) * block_size
        n = draw(st.one_of(st.just(0), st.just(1), st.just(1), st.integers(2, max_new)))
        length = common + n + draw(st.integers(0, max_own))
        needed = -(-length // block_size) - len(row)
        rows.append(row + list(range(fresh, fresh + needed)))
        fresh += needed
        new.append(n)
        valid.append(length)
    ids = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(fresh + 2)
    tables = np.full((len(rows), max(map(len, rows), default=0) + 1), ids[-1], dtype=np.int32)
    for s, row in enumerate(rows):
        tables[s, : len(row)] = ids[row]
    return (new, valid), tables


@dataclass(frozen=True, eq=False)
class Step:
    """The arguments of one call, and what they mean in float64."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    plan: AttentionPlan
    features: Features

    @property
    def num_blocks(self) -> int:
        return self.k_pool.shape[0]

    def truth(self) -> torch.Tensor:
        k, v = self.k_pool, self.v_pool
        if self.k_scales is not None and self.v_scales is not None:
            k, v = dequantise(k, self.k_scales), dequantise(v, self.v_scales)
        return paged_attention_reference(self.q, k, v, self.plan, self.features)

    def check(self, got: torch.Tensor) -> None:
        want = self.truth()
        assert got.dtype == self.q.dtype and got.shape == self.q.shape
        assert not want.isnan().any(), "the step itself reads poison"
        bound = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def make_step(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    tables: Tables,
    block_size: int,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    features: Collection[str] = (),
    sliding_window: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Step:
    """Fill a pool for the tables; what no query sees is NaN, or has a NaN for its scale."""
    generator = torch.Generator().manual_seed(seed)
    plan = AttentionPlan.build(query_lens, kv_lens, tables, block_size, device)
    num_blocks = int(tables.max(initial=0)) + 1
    visible = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for s, (n, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        first = 0 if sliding_window is None else max(0, length - n - sliding_window + 1)
        visible[torch.from_numpy(plan.slots_of(s, first if n else length, length))] = True
    poison = ~visible.view(num_blocks, block_size)[:, :, None, None]
    shape = (num_blocks, block_size, num_kv_heads, head_dim)

    def pool() -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.randn(shape, generator=generator).masked_fill(poison, torch.nan)
        if pool_dtype is None:
            return values.to(device, dtype), None
        codes, scales = quantise(values, pool_dtype)
        return codes.to(device), scales.to(device)

    (k_pool, k_scales), (v_pool, v_scales) = pool(), pool()
    num_heads = num_kv_heads * group
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    sinks, slopes = torch.randn(num_heads, generator=generator), torch.rand(num_heads)
    return Step(
        q.to(device, dtype),
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        plan,
        Features(
            head_dim**-0.5,
            sliding_window,
            2.0 if "soft cap" in features else None,
            sinks.to(device) if "sinks" in features else None,
            slopes.to(device) if "alibi" in features else None,
        ),
    )


@st.composite
def steps(draw: st.DrawFn, dtypes: Sequence[torch.dtype], max_own: int) -> Step:
    """Any step: heads, head sizes, block sizes, features, pools and prefixes of all kinds."""
    block_size = draw(st.sampled_from((1, 3, 16, 64, 256)))
    lens, tables = tree_tables(draw, block_size, max_seqs=4, max_new=20, max_own=max_own)
    return make_step(
        *lens,
        tables,
        block_size,
        num_kv_heads=draw(st.sampled_from((1, 2))),
        group=draw(st.sampled_from((1, 3, 4, 8))),
        head_dim=draw(st.sampled_from((64, 80, 96, 128, 256))),
        dtype=draw(st.sampled_from(dtypes)),
        pool_dtype=draw(st.sampled_from(POOLS)),
        features=draw(st.sets(st.sampled_from(("soft cap", "sinks", "alibi")))),
        sliding_window=draw(st.sampled_from((None, None, 1, 33, 64, 100))),
        seed=draw(st.integers(0, 2**16)),
    )
