"""The lines of the GPU table about latent attention, and about writing and moving blocks."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from examples.bench.gpu.rows import Row, Sizes
from examples.bench.gpu.timing import Column
from radixkv.kernels.copy import copy_torch
from radixkv.kernels.gather import gather_torch, scatter_torch
from radixkv.kernels.layout import KVPool
from radixkv.kernels.mla import mla_attention
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.triton_moves import copy_triton, gather_triton, scatter_triton
from radixkv.kernels.triton_write import write_triton
from radixkv.kernels.write import write_torch


def latent_rows(sizes: Sizes) -> Iterator[Row]:
    """Decode over the latents of a DeepSeek-V3: rank 512, 64 rotary dimensions."""
    for heads in (16, 128):
        yield _latent(f"latent decode 64 x 4096, {heads} heads", sizes, heads)


def move_rows(sizes: Sizes) -> Iterator[Row]:
    """Write the tokens of a large step; copy, gather and scatter blocks of 32 layers."""
    for dtype in (sizes.dtype, torch.int8, torch.float8_e4m3fn):
        yield _write(f"write 8192 {str(dtype).removeprefix('torch.')}", sizes, dtype)
    yield from _blocks(sizes)


def _latent(name: str, sizes: Sizes, heads: int) -> Row:
    rank, rope = (16, 8) if sizes.tiny else (512, 64)
    seqs, kv_len, size = sizes.down(64, 2), sizes.down(4096, 40), sizes.block_size
    heads = sizes.down(heads, 4)
    width = -(-kv_len // size)
    tables = np.random.default_rng(0).permutation(seqs * width).reshape(seqs, width)
    plan = AttentionPlan.build([1] * seqs, [kv_len] * seqs, tables, size, sizes.device)
    kind = {"device": sizes.device, "dtype": sizes.dtype}
    shape = (seqs * width, size, rank + rope)
    one = int(np.prod(shape)) * sizes.dtype.itemsize
    pools = [torch.randn(shape, **kind) for _ in range(sizes.sets(one))]  # type: ignore[call-overload]
    q = torch.randn(seqs, heads, rank + rope, **kind)  # type: ignore[call-overload]
    scale = (rank + rope) ** -0.5
    dense = [
        p[plan.block_tables.long()].flatten(1, 2)[:, None, :kv_len].contiguous() for p in pools
    ]

    def ours(i: int) -> torch.Tensor:
        return mla_attention(
            q[..., :rank], q[..., rank:], pools[i], plan, scale=scale, backend="triton"
        )

    def sdpa(i: int) -> torch.Tensor:
        keys = dense[i]  # one head, whose queries are all heads of the model
        return scaled_dot_product_attention(q[:, None], keys, keys[..., :rank], scale=scale)

    def check() -> None:
        torch.testing.assert_close(ours(0), sdpa(0)[:, 0], rtol=2e-2, atol=2e-2)

    columns = {"ours": Column(ours), "sdpa": Column(sdpa)}
    return Row(name, columns, len(pools), one, check=check)


def _write(name: str, sizes: Sizes, dtype: torch.dtype) -> Row:
    tokens, heads, head_dim = sizes.down(8192, 16), sizes.kv_heads, sizes.head_dim
    blocks = 2 * -(-tokens // sizes.block_size)
    shape = (blocks, sizes.block_size, heads, head_dim)
    sets = sizes.sets(KVPool.bytes_per_block(1, *shape[1:], dtype) * blocks)
    ours, other = (KVPool.allocate(sets, *shape, dtype, sizes.device) for _ in range(2))
    size = (sets, 2, tokens, heads, head_dim)
    new = torch.randn(size, device=sizes.device, dtype=sizes.dtype)
    slots = torch.randperm(blocks * sizes.block_size, device=sizes.device)[:tokens]

    def call(pool: KVPool, i: int) -> tuple[torch.Tensor | None, ...]:
        return (*new[i], pool.k[i], pool.v[i], slots, pool.k_scales[i], pool.v_scales[i])

    def check() -> None:
        write_triton(*call(ours, 0))  # type: ignore[arg-type]
        write_torch(*call(other, 0))  # type: ignore[arg-type]
        assert torch.equal(ours.data.view(torch.uint8), other.data.view(torch.uint8))

    columns = {
        "ours": Column(lambda i: write_triton(*call(ours, i))),  # type: ignore[arg-type]
        "torch": Column(lambda i: write_torch(*call(other, i))),  # type: ignore[arg-type]
    }
    written = ours.block_bytes / sets / sizes.block_size * tokens
    return Row(name, columns, sets, new[0].numel() * new.element_size() + written, check=check)


def _blocks(sizes: Sizes) -> Iterator[Row]:
    """All layers of a model are one set: a move takes them in one launch."""
    count = sizes.down(256, 3)
    shape = (sizes.down(32, 2), 4 * count, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    pool = KVPool.allocate(*shape, sizes.dtype, sizes.device)
    pool.data.normal_()
    rng = np.random.default_rng(0)
    ids = rng.permutation(4 * count)
    moves = np.stack([ids[:count], ids[count : 2 * count], np.full(count, sizes.block_size)], 1)
    here, there = (torch.from_numpy(x).to(sizes.device) for x in (ids[:count], ids[-count:]))
    records = gather_torch(pool, here)
    work = 2.0 * count * pool.block_bytes

    def check_copy() -> None:
        copy_triton(pool, moves)
        assert torch.equal(gather_triton(pool, here), records)
        assert torch.equal(gather_torch(pool, torch.from_numpy(moves[:, 1]).to(here)), records)

    def check_scatter() -> None:
        scatter_triton(pool, there, records)
        assert torch.equal(gather_torch(pool, there), records)

    yield Row(
        "copy 256 blocks",
        {
            # Their lists of blocks come from the host with every call.
            "ours": Column(lambda i: copy_triton(pool, moves), graph=False),
            "torch": Column(lambda i: copy_torch(pool, moves), graph=False),
        },
        1,
        work,
        check=check_copy,
    )
    yield Row(
        "gather 256 blocks",
        {
            "ours": Column(lambda i: gather_triton(pool, here)),
            "torch": Column(lambda i: gather_torch(pool, here)),
        },
        1,
        work,
    )
    yield Row(
        "scatter 256 blocks",
        {
            "ours": Column(lambda i: scatter_triton(pool, there, records)),
            "torch": Column(lambda i: scatter_torch(pool, there, records)),
        },
        1,
        work,
        check=check_scatter,
    )
