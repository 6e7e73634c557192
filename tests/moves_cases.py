"""Draws pools, moves and latents for the kernels that write, move and attend over latents, and says
how to check their answers: on the CPU in the interpreter, or on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from radixkv.kernels.copy import Moves, copy_torch
from radixkv.kernels.gather import gather_torch, scatter_torch
from radixkv.kernels.layout import KVPool
from radixkv.kernels.mla import mla_attention
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.write import write_torch
from tests.kernel_cases import TOLERANCE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool, and the seed of what is in it."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    seed: int

    def pool(self) -> KVPool:
        """Make the pool on the CPU with random bits everywhere, NaN among them."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = (self.layers, self.blocks, self.block_size, self.heads, self.head_dim)
        pool = KVPool.allocate(*sizes, self.dtype)
        for tensor in (pool.data, pool.scales):
            if tensor is not None:
                tensor.view(torch.uint8).random_(0, 256, generator=generator)
        return pool

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@st.composite
def shapes(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (*FLOATS, *QUANTISED)) -> Shape:
    return Shape(
        layers=draw(st.integers(1, 2)),
        blocks=draw(st.integers(1, 6)),
        block_size=draw(st.sampled_from((1, 3, 16))),
        heads=draw(st.sampled_from((1, 3, 8))),
        head_dim=draw(st.sampled_from((1, 7, 8, 64, 80, 128))),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )


def moved(pool: KVPool, device: str) -> KVPool:
    """Copy a pool to a device."""
    scales = None if pool.scales is None else pool.scales.to(device, copy=True)
    return KVPool.over(pool.data.to(device, copy=True), scales)


def assert_same_bits(got: KVPool, want: KVPool) -> None:
    assert torch.equal(got.data.cpu().view(torch.uint8), want.data.view(torch.uint8))
    if want.scales is not None:
        assert got.scales is not None
        assert torch.equal(got.scales.cpu().view(torch.int32), want.scales.view(torch.int32))


def check_copy(shape: Shape, device: str) -> None:
    from radixkv.kernels.triton_moves import copy_triton

    want, rng = shape.pool(), shape.rng
    count = rng.integers(1, shape.blocks + 1)
    moves: Moves = np.stack(
        [
            rng.integers(0, shape.blocks, count),
            rng.permutation(shape.blocks)[:count],
            rng.integers(0, shape.block_size + 1, count),
        ],
        axis=1,
    )
    got = moved(want, device)
    copy_torch(want, moves)
    copy_triton(got, moves)
    assert_same_bits(got, want)


def check_swap(shape: Shape, device: str) -> None:
    """Gather some blocks, scatter them to others; ids outside the pool are passed over."""
    from radixkv.kernels.triton_moves import gather_triton, scatter_triton

    want, rng = shape.pool(), shape.rng
    got = moved(want, device)
    sources = torch.from_numpy(rng.integers(0, shape.blocks, shape.blocks + 1))
    records = gather_torch(want, sources)
    assert records.shape == (shape.blocks + 1, want.block_bytes)
    assert torch.equal(gather_triton(got, sources.int().to(device)).cpu(), records)

    targets = torch.from_numpy(rng.permutation(shape.blocks + 1))  # one of them is too far
    inside = targets < shape.blocks
    scatter_torch(want, targets[inside], records[inside])
    scatter_triton(got, targets.to(device), records.to(device))
    assert_same_bits(got, want)
    outside = torch.tensor([-1, shape.blocks, 0, 2**31 - 1], device=device)
    gathered = gather_triton(got, outside).cpu()
    assert not gathered[[0, 1, 3]].any()
    assert torch.equal(gathered[2:3], gather_torch(want, torch.tensor([0])))


def check_write(shape: Shape, new: torch.dtype, device: str) -> None:
    """Write through slots of which some are outside the pool, from strided tensors."""
    from radixkv.kernels.triton_write import write_triton

    want, rng = shape.pool(), shape.rng
    got = moved(want, device)
    num_slots = shape.blocks * shape.block_size
    inside = rng.permutation(num_slots)[: rng.integers(0, num_slots + 1)]
    slots = torch.from_numpy(rng.permutation([*inside, -1, num_slots, -(2**40)]).astype(np.int64))
    generator = torch.Generator().manual_seed(shape.seed)
    size = (2, shape.heads, len(slots), shape.head_dim)
    both = torch.randn(size, generator=generator)
    # Vectors of all magnitudes, one of zeros, and one that is not finite.
    both *= torch.randn(size[:3], generator=generator).mul(20).exp()[..., None].clamp(max=1e4)
    both[0, 0, 0] = 0.0
    both[1, -1, -1, -1] = torch.inf
    k, v = both.to(new).transpose(1, 2)
    live = (slots >= 0) & (slots < num_slots)
    layer = shape.layers - 1
    write_torch(k[live], v[live], want.k[layer], want.v[layer], slots[live],
                want.k_scales[layer], want.v_scales[layer])  # fmt: skip
    write_triton(k.to(device), v.to(device), got.k[layer], got.v[layer], slots.to(device),
                 got.k_scales[layer], got.v_scales[layer])  # fmt: skip
    assert_same_bits(got, want)


@dataclass(frozen=True, eq=False)
class LatentCase:
    """One call of ``mla_attention``; what must not be read of the permuted pool is NaN."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    pool: torch.Tensor
    plan: AttentionPlan

    def run(self, backend: str) -> torch.Tensor:
        return mla_attention(
            self.q_latent, self.q_rope, self.pool, self.plan, scale=0.1, backend=backend
        )

    def check(self, backend: str) -> None:
        got, want = self.run(backend), self.run("reference")
        assert got.dtype == self.q_latent.dtype and got.shape == self.q_latent.shape
        assert not want.isnan().any(), "the case itself reads poison"
        bound = TOLERANCE[self.q_latent.dtype]
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def latent_case(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    block_size: int = 16,
    heads: int = 4,
    rank: int = 64,
    rope: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> LatentCase:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in kv_lens]
    ids = rng.permutation(sum(counts) + 2)
    tables = np.full((len(kv_lens), max(counts, default=0) + 1), ids[-1], dtype=np.int32)
    pool = torch.full((len(ids), block_size, rank + rope), torch.nan)
    used = 0
    for s, (count, n) in enumerate(zip(counts, kv_lens, strict=True)):
        tables[s, :count] = ids[used : used + count]
        used += count
        if query_lens[s]:
            for b in range(count):
                valid = min(block_size, n - b * block_size)
                fresh = torch.randn(valid, rank + rope, generator=generator)
                pool[int(tables[s, b]), :valid] = fresh
    tokens = sum(query_lens)
    q = torch.randn(tokens, heads, rank + rope, generator=generator).to(device, dtype)
    plan = AttentionPlan.build(query_lens, kv_lens, tables, block_size, device)
    return LatentCase(q[..., :rank], q[..., rank:], pool.to(device, dtype), plan)


@st.composite
def latent_cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = FLOATS) -> LatentCase:
    new = st.sampled_from((0, 1, 1, 1, 3))
    sequences = draw(st.lists(st.tuples(new, st.integers(0, 60)), max_size=3))
    return latent_case(
        [n for n, _ in sequences],
        [n + cached for n, cached in sequences],
        block_size=draw(st.sampled_from((1, 3, 16, 64, 100))),
        heads=draw(st.sampled_from((1, 5, 16, 40))),
        rank=draw(st.sampled_from((16, 48, 64, 128))),
        rope=draw(st.sampled_from((8, 16, 64))),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )
