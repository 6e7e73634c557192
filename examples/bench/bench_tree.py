"""Time attention that reads a shared prefix once against attention that reads it for each sequence.

    python examples/bench/bench_tree.py [--quick] [--backend native|torch] [--threads N]
                                        [--plot FILE.png]

One layer of SmolLM2-135M (9 query and 3 key heads of 64, float32), one new token a sequence, over
batch x shared tokens x own tokens. ``tree / flat`` above 1 is a loss; the cost model is to keep it
below 1.03. Both are called in turn, in the same run, and the best of several times counts: other
work on the machine only ever adds. With one thread it is processor time that is counted.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from radixkv.kernels.attention import choose_backend, paged_attention
from radixkv.kernels.plan import AttentionPlan

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARED = (0, 256, 1024, 4096, 8192)
OWN = (16, 256, 1024)
QUICK_BATCHES, QUICK_SHARED, QUICK_OWN = (1, 2, 8, 32, 64), (0, 256, 1024, 4096), (16, 256)


@dataclass(frozen=True)
class Cell:
    """One point of the grid and what was measured there."""

    batch: int
    shared: int
    own: int
    flat_ms: float
    tree_ms: float

    @property
    def can_share(self) -> bool:
        return self.batch > 1 and self.shared > 0

    @property
    def ratio(self) -> float:
        return self.tree_ms / self.flat_ms


def clock(run: Callable[[], object], calls: int) -> float:
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    for _ in range(calls):
        run()
    return (now() - start) / calls


def measure(batch: int, shared: int, own: int, backend: str, pairs: int) -> Cell:
    """Time both ways over scattered blocks, as a pool has them after a day of traffic."""
    prefix, rest = -(-shared // BLOCK_SIZE), -(-own // BLOCK_SIZE)
    num_blocks = prefix + batch * rest
    ids = np.random.default_rng(0).permutation(num_blocks)
    tables = np.empty((batch, prefix + rest), dtype=np.int32)
    tables[:, :prefix] = ids[:prefix]
    tables[:, prefix:] = ids[prefix:].reshape(batch, rest)
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k, v = torch.randn(shape), torch.randn(shape)
    q = torch.randn(batch, Q_HEADS, HEAD_DIM)

    def attend(share: bool) -> Callable[[], object]:
        ones, lengths = [1] * batch, [shared + own] * batch
        plan = AttentionPlan.build(ones, lengths, tables, BLOCK_SIZE, share=share)
        return lambda: paged_attention(q, k, v, plan, scale=HEAD_DIM**-0.5, backend=backend)

    flat, tree = attend(False), attend(True)
    first = tree(), flat()
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-5)
    calls = max(1, min(50, int(0.002 / clock(flat, 1))))
    flat_s = tree_s = math.inf
    for _ in range(pairs):
        flat_s, tree_s = min(flat_s, clock(flat, calls)), min(tree_s, clock(tree, calls))
    return Cell(batch, shared, own, 1000 * flat_s, 1000 * tree_s)


def measure_grid(grid: list[tuple[int, int, int]], backend: str, pairs: int) -> list[Cell]:
    """Measure the cells; those that seem to lose are looked at again with more patience."""
    cells = []
    for batch, shared, own in grid:
        cell = measure(batch, shared, own, backend, pairs)
        if cell.ratio > 1.02:
            cell = measure(batch, shared, own, backend, 5 * pairs)
        cells.append(cell)
        print(
            f"{batch:6d}{shared:8d}{own:7d}{cell.flat_ms:12.3f}{cell.tree_ms:12.3f}"
            f"{cell.ratio:13.2f}{'  <-- slower' if cell.ratio > 1.03 else ''}",
            flush=True,
        )
    return cells


def plot(cells: list[Cell], title: str, path: Path) -> None:
    """Draw one heat map for each number of own tokens: how many times faster the tree is."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    owns = sorted({cell.own for cell in cells})
    batches = sorted({cell.batch for cell in cells})
    shares = sorted({cell.shared for cell in cells})
    figure = Figure(figsize=(1.5 + 3.6 * len(owns), 4.6), layout="constrained")
    axes = figure.subplots(1, len(owns), sharey=True, squeeze=False)[0]
    norm = mpl.colors.LogNorm(0.5, 32)
    image = None
    for axis, own in zip(axes, owns, strict=True):
        speed = np.full((len(batches), len(shares)), np.nan)
        for cell in cells:
            if cell.own == own:
                speed[batches.index(cell.batch), shares.index(cell.shared)] = 1 / cell.ratio
        image = axis.imshow(speed, norm=norm, cmap="viridis", origin="lower", aspect="auto")
        for (row, column), value in np.ndenumerate(speed):
            axis.text(
                column,
                row,
                f"{value:.2f}" if value < 2 else f"{value:.1f}",
                ha="center",
                va="center",
                color="black" if value > 6 else "white",
                fontsize=9,
            )
        axis.set_title(f"{own} own tokens each", fontsize=10)
        axis.set_xticks(range(len(shares)), [str(n) for n in shares])
        axis.set_yticks(range(len(batches)), [str(n) for n in batches])
        axis.set_xlabel("shared tokens")
    axes[0].set_ylabel("sequences")
    figure.suptitle(title, fontsize=11)
    ticks = [0.5, 1, 2, 4, 8, 16, 32]
    assert image is not None, "a grid has columns"
    bar = figure.colorbar(image, ax=axes, label="times faster than flat", ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:g}x" for tick in ticks])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller grid: under a minute")
    parser.add_argument("--backend", choices=("native", "torch"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    backend = args.backend or choose_backend(torch.device("cpu"))
    batches, shares, owns = (
        (QUICK_BATCHES, QUICK_SHARED, QUICK_OWN) if args.quick else (BATCHES, SHARED, OWN)
    )
    grid = [(batch, shared, own) for own in owns for shared in shares for batch in batches]
    print(f"backend {backend}, {args.threads} threads, one layer, float32, blocks of {BLOCK_SIZE}")
    print(f"{'batch':>6}{'shared':>8}{'own':>7}{'flat ms':>12}{'tree ms':>12}{'tree / flat':>13}")
    cells = measure_grid(grid, backend, 4 if args.quick else 7)
    alike = [cell.ratio for cell in cells if not cell.can_share]
    print(f"nothing to share, so both did the same: ratios {min(alike):.2f} to {max(alike):.2f}")
    everything, cells = cells, [cell for cell in cells if cell.can_share]
    slower = [cell for cell in cells if cell.ratio > 1.03]
    best = min(cells, key=lambda cell: cell.ratio)
    worst = max(cells, key=lambda cell: cell.ratio)
    print(
        f"best {1 / best.ratio:.1f}x at {best.batch} x ({best.shared} + {best.own}); worst ratio "
        f"{worst.ratio:.2f} at {worst.batch} x ({worst.shared} + {worst.own}); "
        f"{len(slower)} of {len(cells)} cells more than 3 % slower"
    )
    if args.plot:
        where = f"backend {backend}, CPU, {args.threads} threads"
        title = f"Attention over a shared prefix, read once against read by each: {where}"
        plot(everything, title, args.plot)


if __name__ == "__main__":
    main()
