"""The lines of the GPU table about attention over the pool: decode, tree decode, prefill."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from examples.bench.gpu.peers import Question, peers, sdpa
from examples.bench.gpu.rows import Row, Sizes
from examples.bench.gpu.timing import Column
from radixkv.kernels.features import Features
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.quant import LIMIT, dequantise
from radixkv.kernels.tree import CostModel
from radixkv.kernels.triton_attention import Tuning, paged_attention_triton
from radixkv.kernels.triton_config import run_tokens, split_tokens
from radixkv.kernels.write import write_kv

CLOSE = 2e-2
"""Ours and a peer's differ by roundings of bfloat16 results of order 1 at most."""


def attention_rows(sizes: Sizes) -> Iterator[Row]:
    """Build the lines one by one: each has gigabytes that the next may use again."""
    batch, context, prompt = sizes.down(64, 3), sizes.down(4096, 40), sizes.down(2048, 24)
    shared, own, few, new = (
        sizes.down(8192),
        sizes.down(256, 8),
        sizes.down(8, 2),
        sizes.down(512, 9),
    )
    # Those of which something is wanted come first, should time run out.
    yield _decode("decode 64 x 4096", sizes, batch, context, wanted=0.8)
    yield _tree("tree 64 x (8192 + 256)", sizes, batch, [(1, shared)], own, wanted=5.0)
    yield _prefill("prefill 8 x 2048", sizes, few, prompt, prompt, wanted=0.6)
    levels = [(1, shared // 2), (few, shared // 2)]
    yield _tree("tree 64 x (4096 + 4096 of 8 + 256)", sizes, max(batch, 2 * few), levels, own)
    yield _prefill("prefill 8 x 512 on 4096", sizes, few, new, context + new)
    yield _decode("decode 1 x 4096", sizes, 1, context)
    yield _decode("decode 64 x 1024", sizes, batch, sizes.down(1024, 20))
    for dtype in LIMIT:
        name = str(dtype).removeprefix("torch.")
        yield _decode(f"decode 64 x 4096 {name}", sizes, batch, context, kv_dtype=dtype)


def _decode(
    name: str,
    sizes: Sizes,
    seqs: int,
    kv_len: int,
    *,
    kv_dtype: torch.dtype | None = None,
    wanted: float | None = None,
) -> Row:
    tables = _scattered(seqs * -(-kv_len // sizes.block_size)).reshape(seqs, -1)
    plan = _plan(sizes, [1] * seqs, [kv_len] * seqs, tables)
    pool = _filled_pool(sizes, plan, kv_dtype or sizes.dtype)
    return _against_peers(name, sizes, plan, pool, seqs, 1, kv_len, wanted)


def _prefill(
    name: str, sizes: Sizes, seqs: int, new: int, kv_len: int, *, wanted: float | None = None
) -> Row:
    tables = _scattered(seqs * -(-kv_len // sizes.block_size)).reshape(seqs, -1)
    plan = _plan(sizes, [new] * seqs, [kv_len] * seqs, tables)
    pool = _filled_pool(sizes, plan, sizes.dtype)
    return _against_peers(name, sizes, plan, pool, seqs, new, kv_len, wanted)


def _tree(
    name: str,
    sizes: Sizes,
    seqs: int,
    levels: list[tuple[int, int]],
    own: int,
    *,
    wanted: float | None = None,
) -> Row:
    """Sequences under ``levels`` of (how many different ones, tokens each), and their own rest."""
    size = sizes.block_size
    ids = iter(_scattered(sum(n * (t // size) for n, t in levels) + seqs * -(-own // size)))
    prefixes = [[[next(ids) for _ in range(t // size)] for _ in range(n)] for n, t in levels]
    tables = [
        [b for level in prefixes for b in level[s * len(level) // seqs]]
        + [next(ids) for _ in range(-(-own // size))]
        for s in range(seqs)
    ]
    kv_len = sum(t // size * size for _, t in levels) + own
    plan = _plan(sizes, [1] * seqs, [kv_len] * seqs, np.array(tables))
    pool = _filled_pool(sizes, plan, sizes.dtype)
    q = _queries(sizes, seqs)
    group = sizes.q_heads // sizes.kv_heads
    split, run = (32, 32) if sizes.tiny else (split_tokens(group), run_tokens(group))
    # A token that costs nothing to read is not worth sharing.
    flat = _ours(sizes, q, pool, plan, Tuning(split, run, CostModel(0.0)))
    shared = Tuning(split, run, CostModel(1.0)) if sizes.tiny else None
    tree = _ours(sizes, q, pool, plan, shared)

    def check() -> None:
        torch.testing.assert_close(tree(0), flat(0), rtol=CLOSE, atol=CLOSE)

    columns = {"ours": Column(tree), "flat": Column(flat)}
    work = pool.block_bytes / pool.num_layers * pool.num_blocks  # each key read once
    over = "flat" if wanted is not None else None
    return Row(name, columns, pool.num_layers, work, wanted=wanted, over=over, check=check)


def _against_peers(
    name: str,
    sizes: Sizes,
    plan: AttentionPlan,
    pool: KVPool,
    seqs: int,
    new: int,
    kv_len: int,
    wanted: float | None,
) -> Row:
    q = _queries(sizes, seqs * new)
    ours = _ours(sizes, q, pool, plan)
    pages = list(zip(pool.k, pool.v, strict=True))
    dense = [_dense(pool, i, plan, kv_len, sizes.dtype) for i in range(pool.num_layers)]
    asked = Question(seqs, new, kv_len, plan, q, pages, dense)
    notes: list[str] = []
    columns = {"ours": Column(ours)}
    if pool.scales is None:  # the peers have no scales of this kind
        columns |= peers(asked, sizes, notes)

    def check() -> None:
        want = sdpa(asked)(0).transpose(1, 2).reshape(q.shape)
        torch.testing.assert_close(ours(0), want, rtol=CLOSE, atol=CLOSE)

    if new == 1:
        work = pool.block_bytes / pool.num_layers * pool.num_blocks
        return Row(name, columns, pool.num_layers, work, wanted=wanted, check=check, notes=notes)
    pairs = new * (kv_len - new) + new * (new + 1) / 2
    flop = 4 * seqs * pairs * sizes.q_heads * sizes.head_dim
    return Row(name, columns, pool.num_layers, flop, True, wanted, check=check, notes=notes)


def _ours(
    sizes: Sizes,
    q: torch.Tensor,
    pool: KVPool,
    plan: AttentionPlan,
    tuning: Tuning | None = None,
) -> Callable[[int], torch.Tensor]:
    features = Features(sizes.head_dim**-0.5)
    return lambda i: paged_attention_triton(
        q, pool.k[i], pool.v[i], plan, features, pool.k_scales[i], pool.v_scales[i], tuning=tuning
    )


def _queries(sizes: Sizes, rows: int) -> torch.Tensor:
    shape = (rows, sizes.q_heads, sizes.head_dim)
    return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)


def _plan(
    sizes: Sizes,
    query_lens: list[int],
    kv_lens: list[int],
    tables: npt.NDArray[np.int64],
) -> AttentionPlan:
    return AttentionPlan.build(query_lens, kv_lens, tables, sizes.block_size, sizes.device)


def _scattered(count: int) -> npt.NDArray[np.int64]:
    """Block ids in no order: what a pool looks like after a day of traffic."""
    return np.random.default_rng(0).permutation(count)


def _filled_pool(sizes: Sizes, plan: AttentionPlan, dtype: torch.dtype) -> KVPool:
    """Make a pool of as many layers as there are to be sets, every slot written."""
    blocks = int(plan.host_block_tables.max()) + 1
    shape = (blocks, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    sets = sizes.sets(KVPool.bytes_per_block(1, *shape[1:], dtype) * blocks)
    pool = KVPool.allocate(sets, *shape, dtype, sizes.device)
    slots = torch.arange(blocks * sizes.block_size, device=sizes.device)
    for i in range(sets):
        new = torch.randn(2, len(slots), *shape[2:], device=sizes.device, dtype=sizes.dtype)
        write_kv(new[0], new[1], pool.k[i], pool.v[i], slots, pool.k_scales[i], pool.v_scales[i])
    return pool


def _dense(
    pool: KVPool, layer: int, plan: AttentionPlan, kv_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pool holds, as contiguous [seqs, kv heads, kv_len, head_dim]."""
    tables = plan.block_tables.long()

    def one(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        values = codes if scales is None else dequantise(codes, scales, dtype)
        return values[tables].flatten(1, 2)[:, :kv_len].transpose(1, 2).contiguous()

    return (
        one(pool.k[layer], pool.k_scales[layer]),
        one(pool.v[layer], pool.v_scales[layer]),
    )
