"""What a line of the GPU table asks and answers; knows units and goals, no kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from examples.bench.gpu.timing import Column, median_seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """The machine under the table: its device, and shapes that suit it."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    shrink: int  # divides batches, contexts and copies; 1 on a GPU
    set_bytes: int  # what all sets of data take together, well over the last cache
    gemm: int  # edge of the square matrices multiplied for comparison
    copy_bytes: int

    @property
    def tiny(self) -> bool:
        return self.shrink > 1

    def down(self, n: int, least: int = 1) -> int:
        return max(least, n // self.shrink)

    def sets(self, one: int) -> int:
        """How many sets of ``one`` bytes make calls find nothing of theirs in the cache."""
        return 1 if self.tiny else max(2, min(16, self.set_bytes // one))


GPU = Sizes(torch.device("cuda"), torch.bfloat16, 32, 8, 128, 16, 1, 2 << 30, 8192, 1 << 30)
"""The heads of an 8B Llama."""

DRY = Sizes(torch.device("cpu"), torch.bfloat16, 2, 1, 16, 4, 128, 1, 64, 1 << 12)
"""For the interpreter on a CPU: every line of the table, none of its numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One line: "ours" first, then what it is compared with.

    work   bytes or floating point operations of a call of ours
    gemm   whether the machine's measure is a matrix product, else a copy
    wanted a share of the machine's measure on an H200, or (``over``) a factor over another column
    check  compares results before anything is timed
    """

    name: str
    columns: dict[str, Column]
    sets: int
    work: float
    gemm: bool = False
    wanted: float | None = None
    over: str | None = None
    check: Callable[[], None] | None = None
    notes: list[str] = field(default_factory=list)

    def measure(self, sizes: Sizes, rounds: int) -> dict[str, Any]:
        """Check, time and judge; the answer is plain data, times in microseconds a call."""
        if self.check is not None:
            self.check()
        machine, machine_work = _machine(sizes, self.gemm)
        columns = self.columns | {"machine": Column(machine)}
        seconds = median_seconds(columns, self.sets, rounds, sizes.device, self.notes)
        rate, top = self.work / seconds["ours"], machine_work / seconds["machine"]
        reached = rate / top if self.over is None else seconds[self.over] / seconds["ours"]
        return {
            "row": self.name,
            "us": {name: round(value * 1e6, 2) for name, value in seconds.items()},
            "rate": round(rate / (1e12 if self.gemm else 1e9), 2),
            "unit": "TFLOP/s" if self.gemm else "GB/s",
            "share": round(rate / top, 3),
            "wanted": self.wanted,
            "over": self.over,
            "reached": round(reached, 3),
            "met": None if self.wanted is None or sizes.tiny else bool(reached >= self.wanted),
            "notes": self.notes,
        }


def _machine(sizes: Sizes, gemm: bool) -> tuple[Callable[[int], object], int]:
    """What the machine does best of the kind, and its work: a copy reads and writes its bytes."""
    if gemm:
        shape = (sizes.gemm, sizes.gemm)
        a, b = (torch.randn(shape, device=sizes.device, dtype=sizes.dtype) for _ in range(2))
        out = torch.empty_like(a)
        return (lambda i: torch.mm(a, b, out=out)), 2 * sizes.gemm**3
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    return (lambda i: target.copy_(source)), 2 * sizes.copy_bytes


VERDICTS = {True: "met", False: "NOT MET", None: "not judged"}


def as_table(results: list[dict[str, Any]]) -> str:
    """Lay the results out: times in microseconds a call, "x" of ours in brackets."""
    others = list(
        dict.fromkeys(c for r in results for c in r["us"] if c not in ("ours", "machine"))
    )
    head = f"{'us a call':36s}{'ours':>10}{'rate':>9} {'':8s}{'share':>6}"
    lines = [head + "".join(f"{name:>19}" for name in others) + "  wanted on an H200"]
    for r in results:
        us = r["us"]
        line = f"{r['row']:36s}{us['ours']:10.1f}{r['rate']:9.1f} {r['unit']:8s}{r['share']:6.2f}"
        for name in others:
            shown = f"{us[name]:.1f} ({us[name] / us['ours']:.2f}x)" if name in us else "-"
            line += f"{shown:>19}"
        if r["wanted"] is not None:
            unit = "share" if r["over"] is None else f"x {r['over']}"
            line += f"  {r['wanted']:g} {unit}, {VERDICTS[r['met']]}"
        lines.append(line)
    lines += [f"{r['row']}: {note}" for r in results for note in r["notes"]]
    return "\n".join(lines)
