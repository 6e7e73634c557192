"""Draw what bench_engine.py measured: TTFT over the cached share, and the ratios to the peers.

    python examples/bench/plots.py RESULT.json [--folder examples/bench/results]

Writes NAME-ttft.png and NAME-ratios.png, NAME being the result's. Needs matplotlib (the extra
``bench``). What the file does not hold is left out of the pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.bench.engine.report import ENGINES, FIGURES, figure_of, reach

COLOURS = dict(zip(ENGINES, ("#c03028", "#3a6ea5", "#6a9a3a", "#b08020", "#888888"), strict=True))
RATIOS = ("a", "b", "c.warm", "d", "w", "e", "f")


def speedups(engines: dict[str, Any]) -> dict[str, list[float | None]]:
    """How many times as fast as each peer radixkv is, one number for each figure of RATIOS."""
    found: dict[str, list[float | None]] = {}
    for engine in ENGINES[1:]:
        row: list[float | None] = []
        for figure in RATIOS:
            ours, theirs = figure_of(engines, "radixkv", figure), figure_of(engines, engine, figure)
            row.append(reach(figure, ours, theirs) if ours and theirs else None)
        if any(row):
            found[engine] = row
    return found


def draw_ttft(engines: dict[str, Any], title: str, target: Path) -> None:
    """One panel a prompt length, one line an engine; both axes from 0."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({n for e in engines.values() for n in e.get("t", {}) if n.isdigit()}, key=int)
    if not lengths:
        sys.exit("the result holds no row t: bench_engine.py --only t --output RESULT.json")
    figure, axes = plt.subplots(1, len(lengths), figsize=(5.2 * len(lengths), 3.8), squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        for engine in ENGINES:
            if curve := engines.get(engine, {}).get("t", {}).get(length):
                shares, times = zip(*curve, strict=True)
                axis.plot(
                    [100 * share for share in shares],
                    times,
                    marker="o",
                    markersize=4,
                    color=COLOURS[engine],
                    label=engine,
                )
        axis.set_title(f"a prompt of {int(length):,} tokens")
        axis.set_xlabel("of it cached, %")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("time to first token, ms")
    axes[0][-1].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def draw_ratios(engines: dict[str, Any], title: str, target: Path) -> None:
    """One group of bars a figure; the line at 1 is where both are equally fast."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = speedups(engines)
    if not found:
        sys.exit("the result holds no figure of radixkv and a peer together")
    figure, axis = plt.subplots(figsize=(9.6, 4.2))
    width = 0.8 / len(found)
    for i, (engine, row) in enumerate(found.items()):
        at = [n + (i - (len(found) - 1) / 2) * width for n in range(len(RATIOS))]
        there = [(x, value) for x, value in zip(at, row, strict=True) if value]
        bars = axis.bar(
            [x for x, _ in there],
            [value for _, value in there],
            width,
            color=COLOURS[engine],
            label=engine,
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    names = [f"{name}\n{_short(FIGURES[name][0])}" for name in RATIOS]
    axis.set_xticks(range(len(RATIOS)), names, fontsize=7)
    axis.set_ylabel("radixkv is so many times as fast")
    axis.legend(frameon=False, fontsize=8, ncols=len(found))
    axis.grid(axis="y", alpha=0.25)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _short(what: str) -> str:
    for before, after in ((" -> ", "\n-> "), (", ", "\n"), ("with ", "with\n"), (" x [", " x\n[")):
        what = what.strip().replace(before, after)
    return what.replace(" of them cached", "\nof 1,024 cached").replace("the shared", "the\nshared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--folder", type=Path, help="where the pictures go; beside the result")
    args = parser.parse_args()
    data = json.loads(args.result.read_text())
    folder = args.folder or args.result.parent
    title = f"SmolLM2-135M, {data['machine']}, {data['threads']} threads"
    for kind, draw in (("ttft", draw_ttft), ("ratios", draw_ratios)):
        target = folder / f"{args.result.stem}-{kind}.png"
        draw(data["engines"], title, target)
        print(target)


if __name__ == "__main__":
    main()
