"""Time the kernels against what the machine can do and against the attention that others offer.

    python examples/bench/bench_kernels.py [--quick] [--threads N] [--device cpu|cuda] [--dtype ...]
                                           [--budget S] [--output FILE]

Prints one table. `share` is the rate reached over the machine's own, measured in the same run, call
by call in turn: other work on the machine slows all columns alike. Each call reads another layer's
pool, as a model does.

On a CPU: paged attention; the machine's own is its read (decode) or its matrix product (prefill).
On CUDA, within five minutes: decode, tree decode, prefill and latent attention, against torch's
SDPA over contiguous keys, FlexAttention and, where installed, FlashInfer; writing and moving blocks
against torch; the machine's own is a device copy, or a matrix product for prefill. What is wanted
of an H200 stands beside. Then a line of JSON for each row, which --output also writes to a file.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
CPU_SHAPES = (
    Shape("decode 1 x 1000", 1, 1, 1000),
    Shape("decode 32 x 100", 32, 1, 100),
    Shape("decode 32 x 1000", 32, 1, 1000),
    Shape("prefill 24 on 1000", 1, 24, 1024),
    Shape("prefill 1024", 1, 1024, 1024),
)
BLOCK_SIZE = 16


def clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(
    columns: dict[str, Callable[[int], object]], layers: int, rounds: int
) -> dict[str, float]:
    """Time each column in turn, ``layers`` calls at a time; seconds a call."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    for turn in range(rounds + 1):
        for name, call in columns.items():
            seconds = clock(lambda call=call: [call(i) for i in range(layers)])  # type: ignore[misc]
            if turn:  # the first round compiles and warms
                times[name].append(seconds / layers)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape: Shape, model: Model, dtype: torch.dtype, rounds: int, budget_bytes: int) -> str:
    width = -(-shape.kv_len // BLOCK_SIZE)
    num_blocks = shape.seqs * width
    kv_shape = (num_blocks, BLOCK_SIZE, model.kv_heads, model.head_dim)
    layer_bytes = 2 * num_blocks * BLOCK_SIZE * model.kv_heads * model.head_dim * dtype.itemsize
    layers = max(1, min(model.layers, budget_bytes // (2 * layer_bytes)))
    k_pools, v_pools = ([torch.randn(kv_shape).to(dtype) for _ in range(layers)] for _ in range(2))
    # Scattered blocks: what a pool looks like after a day of traffic.
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(shape.seqs, width)
    plan = AttentionPlan.build(
        [shape.new] * shape.seqs, [shape.kv_len] * shape.seqs, tables, BLOCK_SIZE
    )
    tokens = shape.seqs * shape.new
    q = torch.randn(tokens, model.q_heads, model.head_dim).to(dtype)
    scale = model.head_dim**-0.5

    contiguous = (shape.seqs, model.kv_heads, shape.kv_len, model.head_dim)
    dense = [tuple(torch.randn(contiguous).to(dtype) for _ in range(2)) for _ in range(layers)]
    q_dense = q.view(shape.seqs, shape.new, model.q_heads, model.head_dim).transpose(1, 2)
    mask = None
    if not shape.decode and shape.new < shape.kv_len:
        past = shape.kv_len - shape.new
        mask = torch.ones(shape.new, shape.kv_len, dtype=torch.bool).tril(past)

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
    columns["torch"] = ours("torch")
    columns |= {"sdpa": sdpa, "cache+sdpa": grown}
    pairs = shape.new * (shape.kv_len - shape.new) + shape.new * (shape.new + 1) / 2
    flop = 4 * shape.seqs * pairs * model.q_heads * model.head_dim
    square = torch.randn(768, 768).to(dtype)
    if shape.decode:
        columns["machine"] = lambda i: (k_pools[i].sum(), v_pools[i].sum())
        work, machine_work, unit = layer_bytes, layer_bytes, "GB/s"
    else:
        columns["machine"] = lambda i: square @ square
        work, machine_work, unit = int(flop), 2 * len(square) ** 3, "GFLOP/s"

    seconds = medians(columns, layers, rounds)
    rate, top = work / seconds["ours"], machine_work / seconds["machine"]
    micro = "".join(
        f"{seconds[name] * 1e6:11.1f}" if name in seconds else f"{'-':>11}"
        for name in ("ours", "torch", "sdpa", "cache+sdpa")
    )
    return (
        f"{shape.name:20s}{micro}{rate / 1e9:10.1f} {unit:8s}{rate / top:7.2f}"
        f"{seconds['sdpa'] / seconds['ours']:8.2f}x{seconds['cache+sdpa'] / seconds['ours']:8.2f}x"
    )


def cpu_table(rounds: int, dtype: torch.dtype) -> None:
    backend = choose_backend(torch.device("cpu"))
    where = f"CPU, {torch.get_num_threads()} threads"
    print(f"{SMOLLM2.name}, {dtype}, {where}, blocks of {BLOCK_SIZE}, backend {backend}")
    print(
        f"{'us a layer':20s}{'ours':>11}{'torch':>11}{'sdpa':>11}{'cache+sdpa':>11}"
        f"{'rate':>10} {'':8s}{'share':>7}{'/sdpa':>9}{'/cache':>9}"
    )
    for shape in CPU_SHAPES:
        print(measure(shape, SMOLLM2, dtype, rounds, 256 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: under a minute on a CPU"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--budget", type=float, default=240, metavar="S", help="with CUDA: begin no line after this"
    )
    parser.add_argument("--output", type=Path, help="with CUDA: also write the JSON lines here")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    rounds = 5 if args.quick else 15
    if args.device == "cpu" and not args.dry_run:
        cpu_table(rounds, getattr(torch, args.dtype or "float32"))
        return
    # The GPU's table is several files; run as a script, Python looks beside this one only.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.bench.gpu.table import gpu_table

    dtype = getattr(torch, args.dtype or "bfloat16")
    rounds = 0 if args.dry_run else rounds
    gpu_table(rounds, dtype, args.budget, args.output, dry_run=args.dry_run)


if __name__ == "__main__":
    main()
