"""Share of KV blocks that parallel sampling and beam search save, beside what the paper measured.

    python examples/bench/bench_sharing.py [--quick] [--requests N] [--output RESULT.json]
                                           [--plot FILE.png] [--ancestry RESULT.json]

Saved is 1 - blocks held / blocks that the same sequences would hold without sharing, summed over
all steps of all requests. The blocks are the real ones: BlockTables over a PrefixCache, forked,
moved and released as the engine does it. Lengths are drawn after the published means of ShareGPT
and Alpaca (radixkv.simulate.lengths).

Which beam goes on from which is what a model decides. It is recorded from real searches: SmolLM2
answers questions in beams of 2, 4 and 6. Longer answers go on with the steps of another recorded
search, drawn by chance. ``--ancestry`` takes the recordings from an earlier result instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity
from radixkv.simulate import lengths
from radixkv.table import BlockTable

BLOCK_SIZE = 16
WIDTHS = (2, 4, 6)
# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
# (2023), section 6.3. Of ShareGPT it names the least and the most.
PUBLISHED: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("alpaca", "sampling"): (6.1, 8.5, 9.8),
    ("alpaca", "beams"): (37.6, 53.1, 55.2),
    ("sharegpt", "sampling"): (16.2, None, 30.5),
    ("sharegpt", "beams"): (44.3, None, 66.3),
}
QUESTIONS = (
    "Give three tips for staying healthy.",
    "What are the three primary colours?",
    "Describe the structure of an atom.",
    "How can we reduce air pollution?",
    "Write a short story in the third person about a boy who finds a map.",
    "Explain why 4/16 is equal to 1/4.",
    "Render a 3D model of a house in words.",
    "Discuss the causes of the Great Depression.",
)

Parents = Sequence[int]
"""Of each running beam, by rank, the rank of the one that it continues."""
Ancestry = dict[int, list[list[Parents]]]
"""By beam width, each recorded search, step by step."""


# -- what a model decides -------------------------------------------------------------------------


def record(questions: Sequence[str], answer_tokens: int) -> tuple[Ancestry, list[dict[str, Any]]]:
    """Search with the real model; return who came from whom, and what the engine copied."""
    from radixkv import Engine
    from radixkv.service.engine.beams_search import BeamSearch

    steps: dict[int, list[Parents]] = {}
    advance = BeamSearch.advance

    def logged(search: BeamSearch, found: Any) -> Any:
        step = advance(search, found)
        if step.parents:
            steps.setdefault(id(search), []).append(step.parents)
        return step

    ancestry: Ancestry = {}
    copied = []
    BeamSearch.advance = logged  # type: ignore[method-assign, assignment]  # to look on, not to change it
    try:
        with Engine("smollm2", kv_memory="512MiB", block_size=BLOCK_SIZE) as engine:
            for width in WIDTHS:
                began = time.perf_counter()
                found = []
                for question in questions:
                    steps.clear()
                    ids = engine.render([{"role": "user", "content": question}])
                    answer = engine.beam_search(
                        ids, beam_width=width, max_tokens=answer_tokens, ignore_eos=True
                    )
                    (path,) = steps.values()
                    found.append(path)
                    moved = reordered_tokens(len(ids), path) * engine.bytes_per_block / BLOCK_SIZE
                    copied.append(
                        {
                            "width": width,
                            "steps": answer.num_steps,
                            "prompt_tokens": len(ids),
                            "copied_blocks": answer.copied_blocks,
                            "copied_bytes": answer.copied_bytes,
                            "most_copied_blocks": answer.most_copied_blocks,
                            "reordered_bytes": moved,
                        }
                    )
                ancestry[width] = found
                print(
                    f"recorded {len(found)} searches of width {width} over {answer_tokens} tokens "
                    f"in {time.perf_counter() - began:.0f} s",
                    file=sys.stderr,
                )
    finally:
        BeamSearch.advance = advance  # type: ignore[method-assign]
    return ancestry, copied


def reordered_tokens(prompt_tokens: int, path: Sequence[Parents]) -> int:
    """Tokens whose KV a contiguous cache copies, one row a beam, to put its rows in order."""
    return sum(
        len(parents) * (prompt_tokens + done)
        for done, parents in enumerate(path)
        if list(parents) != list(range(len(parents)))
    )


def stretched(
    searches: Sequence[Sequence[Parents]], num_steps: int, rng: np.random.Generator
) -> list[Parents]:
    """Return the parents of ``num_steps`` steps: of one recorded search, then of others."""
    found: list[Parents] = []
    while len(found) < num_steps:
        path = searches[int(rng.integers(len(searches)))]
        found += path[1 if found else 0 :]  # all beams come from one in the first step alone
    return found[:num_steps]


# -- what the blocks do ---------------------------------------------------------------------------


class Group:
    """Sequences of one prompt on real tables, and the blocks that they hold step by step."""

    def __init__(self, prompt_tokens: int, answer_tokens: int, width: int) -> None:
        each = -(-(prompt_tokens + answer_tokens) // BLOCK_SIZE) + 1
        cache = PrefixCache(width * each + 1, BLOCK_SIZE)
        identity = CacheIdentity.local("sharing", BLOCK_SIZE)
        first = cache.open(cache.acquire(identity, b""))
        first.reserve(prompt_tokens)
        first.commit(prompt_tokens)
        self.tables: list[BlockTable] = [first]
        self.held = self.unshared = self.copies = 0

    def fork(self, width: int) -> None:
        """Let ``width`` sequences go on from the only one."""
        self.tables += [self.tables[0].fork() for _ in range(width - 1)]

    def move(self, parents: Parents) -> None:
        """Let beams go on from others: who has no heir takes the place of a further heir."""
        alive = set(parents)
        for rank, table in enumerate(self.tables):
            if rank not in alive:
                table.release()
        heirs: set[int] = set()
        after = []
        for parent in parents:
            after.append(self.tables[parent].fork() if parent in heirs else self.tables[parent])
            heirs.add(parent)
        self.tables = after

    def write(self) -> None:
        """Give each sequence a token, and count the blocks."""
        for table in self.tables:
            self.copies += len(table.reserve(1))
        for table in self.tables:
            table.commit(1)
        blocks = [table.blocks.tolist() for table in self.tables]
        self.unshared += sum(map(len, blocks))
        self.held += len({block for held in blocks for block in held})


def sample(prompt_tokens: int, answer_tokens: int, width: int) -> Group:
    """Draw ``width`` answers of one length."""
    group = Group(prompt_tokens, answer_tokens, width)
    group.fork(width)
    for _ in range(answer_tokens - 1):  # the last token never gets a KV entry
        group.write()
    return group


def search(prompt_tokens: int, path: Sequence[Parents]) -> Group:
    """Search along recorded parents."""
    group = Group(prompt_tokens, len(path) + 1, len(path[0]))
    for step, parents in enumerate(path):
        if step:
            group.move(parents)
        else:
            group.fork(len(parents))
        group.write()
    return group


def search_like(
    searches: Sequence[Sequence[Parents]],
    rng: np.random.Generator,
    prompt_tokens: int,
    answer_tokens: int,
) -> Group:
    """Search as the recorded searches went."""
    return search(prompt_tokens, stretched(searches, answer_tokens - 1, rng))


def saved(work: lengths.Workload, run: Callable[[int, int], Group]) -> float:
    """Return the per cent of blocks saved over all steps of all requests."""
    held = unshared = 0
    for prompt_tokens, answer_tokens in zip(
        work.prompts.tolist(), work.answers.tolist(), strict=True
    ):
        group = run(prompt_tokens, max(2, answer_tokens))
        held += group.held
        unshared += group.unshared
    return 100 * (1 - held / unshared)


def measure(ancestry: Ancestry, requests: int) -> dict[str, dict[str, list[float]]]:
    """Run both workloads in every way."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in ("alpaca", "sharegpt"):
        work = lengths.draw(name, requests, seed=1)
        found[name] = {"sampling": [], "beams": []}
        for width in WIDTHS:
            rng = np.random.default_rng(width)
            found[name]["sampling"].append(saved(work, partial(sample, width=width)))
            found[name]["beams"].append(saved(work, partial(search_like, ancestry[width], rng)))
    return found


# -- what is shown --------------------------------------------------------------------------------


def show(found: dict[str, dict[str, list[float]]], copied: Sequence[dict[str, Any]]) -> None:
    """Print the figures beside the published ones."""
    print(f"{'% of blocks saved':32}" + "".join(f"{f'{w} outputs':>20}" for w in WIDTHS))
    print(f"{'':32}" + f"{'here':>12}{'paper':>8}" * len(WIDTHS))
    for name, ways in found.items():
        for way, values in ways.items():
            cells = ""
            for ours, theirs in zip(values, PUBLISHED[name, way], strict=True):
                cells += f"{ours:12.1f}" + (f"{theirs:8.1f}" if theirs else f"{'-':>8}")
            print(f"{f'{name}, {way}':32}{cells}")
    if copied:
        columns = f"{'blocks':>12}{'most':>8}{'KiB':>10}{'in rows, KiB':>16}"
        print(f"\n{'SmolLM2, copied a step':32}{columns}")
        for width in WIDTHS:
            mine = [one for one in copied if one["width"] == width]
            steps = sum(one["steps"] for one in mine)
            print(
                f"{f'{width} beams':32}"
                f"{sum(one['copied_blocks'] for one in mine) / steps:12.2f}"
                f"{max(one['most_copied_blocks'] for one in mine):8d}"
                f"{sum(one['copied_bytes'] for one in mine) / steps / 1024:10.0f}"
                f"{sum(one['reordered_bytes'] for one in mine) / steps / 1024:16.0f}"
            )


def plot(found: dict[str, dict[str, list[float]]], target: Path) -> None:
    """Draw bars: one panel a workload, ours beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(10, 3.8), sharey=True)
    colours = {"sampling": "#2a78d6", "beams": "#1baf7a"}
    for axis, (name, ways) in zip(axes, found.items(), strict=True):
        for offset, (way, values) in zip((-0.2, 0.2), ways.items(), strict=True):
            places = np.arange(len(WIDTHS)) + offset
            axis.bar(places, values, 0.36, color=colours[way], label=f"{way}, here")
            for place, value in zip(places, values, strict=True):
                axis.text(place, 1, f"{value:.1f}", ha="center", fontsize=8, color="white")
            known = [(x, y) for x, y in zip(places, PUBLISHED[name, way], strict=True) if y]
            label = "paper" if way == "beams" else None
            axis.plot(
                *zip(*known, strict=True),
                "k_",
                markersize=26,
                markeredgewidth=2,
                label=label,
            )
        axis.set_xticks(range(len(WIDTHS)), [str(width) for width in WIDTHS])
        axis.set_xlabel("outputs of a request")
        axis.set_title(f"{name} lengths, blocks of {BLOCK_SIZE}")
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("% of blocks saved by sharing")
    axes[0].legend(loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="record less, draw fewer requests")
    parser.add_argument("--requests", type=int, help="of each workload (default 150; quick: 40)")
    parser.add_argument("--ancestry", type=Path, help="an earlier result, to record nothing")
    parser.add_argument("--output", type=Path, help="write figures and recordings as JSON")
    parser.add_argument("--plot", type=Path, help="draw a PNG")
    options = parser.parse_args()
    copied: list[dict[str, Any]] = []
    if options.ancestry:
        earlier = json.loads(options.ancestry.read_text())
        ancestry = {int(width): paths for width, paths in earlier["ancestry"].items()}
        copied = earlier["copied"]
    else:
        ancestry, copied = record(
            QUESTIONS[:4] if options.quick else QUESTIONS, 32 if options.quick else 64
        )
    found = measure(ancestry, options.requests or (40 if options.quick else 150))
    show(found, copied)
    if options.output:
        result = {"saved_percent": found, "copied": copied, "ancestry": ancestry}
        options.output.write_text(json.dumps(result, separators=(",", ":")))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
