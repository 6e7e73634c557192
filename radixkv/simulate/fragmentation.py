"""How much of a KV memory holds tokens under each way of giving it out, for one workload.

Knows strategies and shares of memory; draws only when asked (matplotlib).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from radixkv.simulate import contiguous, paged
from radixkv.simulate.lengths import Workload
from radixkv.simulate.usage import Usage

# Kwon et al. 2023, figure 2 (ShareGPT, OPT-13B): tokens, reserved, internal, external, in per cent.
PUBLISHED = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
OPT_13B_SLOTS = 15_700
"""Tokens that 12 GB hold of OPT-13B's KV, as in that paper."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """All strategies over one workload, and paging over block sizes."""

    workload: str
    capacity: int
    block_size: int
    usages: tuple[Usage, ...]
    by_block_size: tuple[tuple[int, Usage], ...]


def fragmentation(
    work: Workload,
    *,
    capacity: int = OPT_13B_SLOTS,
    block_size: int = 16,
    block_sizes: Sequence[int] = (),
    shared_tokens: int = 0,
    max_tokens: int = 2048,
) -> Fragmentation:
    """Run ``work`` under every strategy.

    ``shared_tokens`` adds paging where so many tokens begin every prompt, without sharing them and
    with: these two are of longer prompts than the rest, and are to be compared with each other.
    """
    usages = [
        contiguous.simulate(work, strategy, capacity, max_tokens)
        for strategy in contiguous.RESERVATIONS
    ]
    usages.append(paged.simulate(work, capacity, block_size, max_tokens=max_tokens))
    if shared_tokens:
        longer = Workload(work.name, work.prompts + shared_tokens, work.answers)
        most = max(max_tokens, shared_tokens + 1)
        unshared = paged.simulate(longer, capacity, block_size, max_tokens=most)
        usages.append(replace(unshared, strategy=f"paged, +{shared_tokens}"))
        usages.append(
            paged.simulate(
                work, capacity, block_size, shared_tokens=shared_tokens, max_tokens=max_tokens
            )
        )
    curve = [
        (size, paged.simulate(work, capacity, size, max_tokens=max_tokens)) for size in block_sizes
    ]
    return Fragmentation(work.name, capacity, block_size, tuple(usages), tuple(curve))


def plot(found: Fragmentation, target: Path) -> None:
    """Draw it into ``target``, a PNG or what else matplotlib writes by that name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with_curve = bool(found.by_block_size)
    figure, axes = plt.subplots(
        1, 1 + with_curve, figsize=(6.4 + 4.6 * with_curve, 3.8), squeeze=False
    )
    left = axes[0][0]
    names = [usage.strategy for usage in found.usages]
    floor = [0.0] * len(names)
    parts = (
        ("tokens", "#2a78d6"),
        ("reserved", "#1baf7a"),
        ("internal", "#eda100"),
        ("external", "#c3c8d1"),
    )
    for part, colour in parts:
        values = [100 * getattr(usage, part) for usage in found.usages]
        left.bar(names, values, bottom=floor, color=colour, label=part, width=0.65)
        floor = [a + b for a, b in zip(floor, values, strict=True)]
    for i, usage in enumerate(found.usages):
        left.annotate(
            f"{100 * usage.tokens:.0f} %", (i, 100 * usage.tokens / 2), ha="center", va="center"
        )
    left.set_ylabel("% of the KV memory")
    left.set_title(f"{found.workload}, {found.capacity} slots, blocks of {found.block_size}")
    left.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    if with_curve:
        right = axes[0][1]
        sizes = [size for size, _ in found.by_block_size]
        right.plot(sizes, [100 * u.tokens for _, u in found.by_block_size], "o-", color="#2a78d6")
        right.set_xscale("log", base=2)
        right.set_xticks(sizes, [str(size) for size in sizes])
        right.set_ylim(0, 100)
        right.set_xlabel("tokens a block")
        right.set_ylabel("% of the KV memory that holds tokens")
        right.set_title("paged")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
