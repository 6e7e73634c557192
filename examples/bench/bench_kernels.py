"""Time paged attention against what the machine can do and against SDPA over contiguous keys.

    python examples/bench/bench_kernels.py [--quick] [--threads N] [--device cpu|cuda] [--dtype ...]

Prints one table. `share` is the rate reached over the rate of the machine's own read (decode) or of
its matrix product (prefill), measured in the same run, call by call in turn: other work on the
machine slows all columns alike. Each call reads another layer's pool, as a model does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.attention import choose_backend, paged_attention
from radixkv.kernels.plan import AttentionPlan


@dataclass(frozen=True)
class Shape:
    """A step: ``seqs`` sequences of ``kv_len`` tokens, the last ``new`` of them to attend."""

    name: str
    seqs: int
    new: int
    kv_len: int

    @property
    def decode(self) -> bool:
        return self.new == 1


@dataclass(frozen=True)
class Model:
    """Heads and layers of the model whose attention is timed."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int


SMOLLM2 = Model("SmolLM2-135M", 9, 3, 64, 30)
LLAMA = Model("Llama-3-8B", 32, 8, 128, 32)
CPU_SHAPES = (
    Shape("decode 1 x 1000", 1, 1, 1000),
    Shape("decode 32 x 100", 32, 1, 100),
    Shape("decode 32 x 1000", 32, 1, 1000),
    Shape("prefill 24 on 1000", 1, 24, 1024),
    Shape("prefill 1024", 1, 1024, 1024),
)
GPU_SHAPES = (
    Shape("decode 1 x 4096", 1, 1, 4096),
    Shape("decode 64 x 1024", 64, 1, 1024),
    Shape("decode 64 x 4096", 64, 1, 4096),
    Shape("prefill 512 on 4096", 8, 512, 4608),
    Shape("prefill 8 x 2048", 8, 2048, 2048),
)
BLOCK_SIZE = 16


def clock(run: Callable[[], object], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(
    columns: dict[str, Callable[[int], object]], layers: int, rounds: int, cuda: bool
) -> dict[str, float]:
    """Time each column in turn, ``layers`` calls at a time; seconds a call."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    for turn in range(rounds + 1):
        for name, call in columns.items():
            seconds = clock(lambda call=call: [call(i) for i in range(layers)], cuda)  # type: ignore[misc]
            if turn:  # the first round compiles and warms
                times[name].append(seconds / layers)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    shape: Shape, model: Model, dtype: torch.dtype, device: str, rounds: int, budget_bytes: int
) -> str:
    cuda = device == "cuda"
    width = -(-shape.kv_len // BLOCK_SIZE)
    num_blocks = shape.seqs * width
    kv_shape = (num_blocks, BLOCK_SIZE, model.kv_heads, model.head_dim)
    layer_bytes = 2 * num_blocks * BLOCK_SIZE * model.kv_heads * model.head_dim * dtype.itemsize
    layers = max(1, min(model.layers, budget_bytes // (2 * layer_bytes)))
    k_pools, v_pools = (
        [torch.randn(kv_shape, device=device).to(dtype) for _ in range(layers)] for _ in range(2)
    )
    # Scattered blocks: what a pool looks like after a day of traffic.
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(shape.seqs, width)
    plan = AttentionPlan.build(
        [shape.new] * shape.seqs, [shape.kv_len] * shape.seqs, tables, BLOCK_SIZE, device
    )
    tokens = shape.seqs * shape.new
    q = torch.randn(tokens, model.q_heads, model.head_dim, device=device).to(dtype)
    scale = model.head_dim**-0.5

    contiguous = (shape.seqs, model.kv_heads, shape.kv_len, model.head_dim)
    dense = [
        tuple(torch.randn(contiguous, device=device).to(dtype) for _ in range(2))
        for _ in range(layers)
    ]
    q_dense = q.view(shape.seqs, shape.new, model.q_heads, model.head_dim).transpose(1, 2)
    mask = None
    if not shape.decode and shape.new < shape.kv_len:
        past = shape.kv_len - shape.new
        mask = torch.ones(shape.new, shape.kv_len, dtype=torch.bool, device=device).tril(past)

    def ours(backend: str) -> Callable[[int], object]:
        return lambda i: paged_attention(
            q, k_pools[i], v_pools[i], plan, scale=scale, backend=backend
        )

    def sdpa(i: int) -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q_dense,
            dense[i][0],
            dense[i][1],
            attn_mask=mask,
            is_causal=mask is None and not shape.decode,
            scale=scale,
            enable_gqa=True,
        )

    def grown(i: int) -> object:
        """What DynamicCache adds in each layer: the cache is copied to append to it."""
        k, v = dense[i]
        cut = shape.kv_len - shape.new
        for x in (k, v):
            torch.cat([x[:, :, :cut], x[:, :, cut:]], dim=-2)
        return sdpa(i)

    columns: dict[str, Callable[[int], object]] = {"ours": ours("auto")}
    if not cuda:
        columns["torch"] = ours("torch")
    columns |= {"sdpa": sdpa, "cache+sdpa": grown}
    pairs = shape.new * (shape.kv_len - shape.new) + shape.new * (shape.new + 1) / 2
    flop = 4 * shape.seqs * pairs * model.q_heads * model.head_dim
    square = torch.randn(4096 if cuda else 768, 4096 if cuda else 768, device=device).to(dtype)
    if shape.decode and cuda:
        copy = torch.empty_like(k_pools[0])
        columns["machine"] = lambda i: copy.copy_(k_pools[i])
        work, machine_work, unit = layer_bytes, layer_bytes, "GB/s"  # a copy reads and writes
    elif shape.decode:
        columns["machine"] = lambda i: (k_pools[i].sum(), v_pools[i].sum())
        work, machine_work, unit = layer_bytes, layer_bytes, "GB/s"
    else:
        columns["machine"] = lambda i: square @ square
        work, machine_work, unit = int(flop), 2 * len(square) ** 3, "GFLOP/s"

    seconds = medians(columns, layers, rounds, cuda)
    rate, top = work / seconds["ours"], machine_work / seconds["machine"]
    micro = "".join(
        f"{seconds[name] * 1e6:11.1f}" if name in seconds else f"{'-':>11}"
        for name in ("ours", "torch", "sdpa", "cache+sdpa")
    )
    return (
        f"{shape.name:20s}{micro}{rate / 1e9:10.1f} {unit:8s}{rate / top:7.2f}"
        f"{seconds['sdpa'] / seconds['ours']:8.2f}x{seconds['cache+sdpa'] / seconds['ours']:8.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    cuda = args.device == "cuda"
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    model = LLAMA if cuda else SMOLLM2
    where = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} threads"
    backend = choose_backend(torch.device(args.device))
    print(f"{model.name}, {dtype}, {where}, blocks of {BLOCK_SIZE}, backend {backend}")
    print(
        f"{'us a layer':20s}{'ours':>11}{'torch':>11}{'sdpa':>11}{'cache+sdpa':>11}"
        f"{'rate':>10} {'':8s}{'share':>7}{'/sdpa':>9}{'/cache':>9}"
    )
    for shape in GPU_SHAPES if cuda else CPU_SHAPES:
        rounds = 5 if args.quick else 15
        print(measure(shape, model, dtype, args.device, rounds, 8 << 30 if cuda else 256 << 20))


if __name__ == "__main__":
    main()
