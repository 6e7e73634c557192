"""Figures of all engines side by side, their ratios and the targets; knows nothing of measuring.

A target is a line: ``figure relation bound [of whom]``, where ``of whom`` is a peer (the bound then
multiplies the peer's figure), another figure of ours, or nothing (the bound is the figure's own).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

ENGINES = ("radixkv", "openvino", "vllm", "llamacpp", "transformers")
TARGETS = (
    "a >= 0.7 llamacpp",
    "b >= 0.7 openvino",
    "c.warm <= 1.2 openvino",
    "c.warm <= 0.08 c.cold",
    "d <= 0.6 vllm",
    "w <= 1.2 openvino",
    "e >= 0.75 openvino",
    "e >= 1.3 vllm",
    "f <= 0.5 vllm",
    "start < 15",
    "s <= 0.05",
)
# figure: what it is, where its number lies, unit, how it is written
FIGURES: dict[str, tuple[str, str, str, str, str]] = {
    "a": ("decode, one stream", "a", "tokens_per_s", "tok/s", ".1f"),
    "b": ("prefill of 1,024, cold", "bc", "prefill_tokens_per_s", "tok/s", ".0f"),
    "c.cold": ("TTFT of 1,024, cold", "bc", "cold_ms", "ms", ".0f"),
    "c.warm": ("  with 1,000 of them cached", "bc", "warm_ms", "ms", ".0f"),
    "d": ("32 x [1,024 shared + 32] -> 32, cold", "d", "wall_s", "s", ".2f"),
    "w": ("  with the shared part primed", "w", "wall_s", "s", ".2f"),
    "e": ("32 x 128 -> 64, output", "e", "tokens_per_s", "tok/s", ".0f"),
    "f": ("64 x [4,096 shared + 32] -> 64, cold", "f", "wall_s", "s", ".1f"),
    "start": ("start to first token", "start", "first_token_s", "s", ".1f"),
    "memory": ("memory at the end", "memory", "gb", "GB", ".2f"),
    "s": ("of a step of 32, not the model", "s", "outside_share", "", ".1%"),
}
RELATIONS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt}
Results = Mapping[str, Mapping[str, Any]]
"""{engine: {measurement: {field: number}}}"""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of TARGETS, read."""

    figure: str
    relation: str
    bound: float
    of: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target beside what was measured; ``ratio`` and ``met`` are None if something is missing."""

    target: Target
    ratio: float | None
    met: bool | None
    why: str = ""


def parse(line: str) -> Target:
    """Read a target's line; raises ValueError, naming what is wrong with it."""
    words = line.split()
    if len(words) not in (3, 4) or words[1] not in RELATIONS:
        raise ValueError(f"{line!r} is no target; wanted: figure >=|<=|<|> bound [of whom]")
    figure, relation, bound, of = *words[:3], words[3] if len(words) == 4 else None
    if figure not in FIGURES:
        raise ValueError(f"{line!r}: no figure {figure!r}")
    if of is not None and of not in FIGURES and of not in ENGINES:
        raise ValueError(f"{line!r}: {of!r} is neither an engine nor a figure")
    return Target(figure, relation, float(bound), of)


def figure_of(results: Results, engine: str, figure: str) -> float | None:
    """A figure as measured, or None."""
    _, measurement, field, _, _ = FIGURES[figure]
    value = results.get(engine, {}).get(measurement, {}).get(field)
    return None if value is None else float(value)


def judge(target: Target, results: Results) -> Verdict:
    """Compare radixkv's figure with the bound."""
    ours = figure_of(results, "radixkv", target.figure)
    if ours is None:
        return Verdict(target, None, None, "radixkv: " + missing(results, "radixkv", target.figure))
    if target.of is None:
        theirs: float | None = 1.0
    elif target.of in ENGINES:
        theirs = figure_of(results, target.of, target.figure)
    else:
        theirs = figure_of(results, "radixkv", target.of)
    if theirs is None:
        engine = str(target.of)
        return Verdict(target, None, None, f"{engine}: " + missing(results, engine, target.figure))
    ratio = ours / theirs
    return Verdict(target, ratio, bool(RELATIONS[target.relation](ratio, target.bound)))


def missing(results: Results, engine: str, figure: str) -> str:
    """Why there is no figure, in a few words."""
    if engine not in results:
        return "not run"
    note = results[engine].get(FIGURES[figure][1], {}).get("note")
    return str(note or "not measured")


def figures_table(results: Results, bounds: Mapping[str, float], title: str) -> Table:
    """One row a figure, one column an engine; the machine's bound beside them."""
    table = Table(title=title, title_justify="left")
    engines = [engine for engine in ENGINES if engine in results]
    table.add_column("")
    table.add_column("what")
    for column in (*engines, "machine's bound", "radixkv of it"):
        table.add_column(column, justify="right")
    for name, (what, _, _, unit, form) in FIGURES.items():
        cells = [_cell(results, engine, name, form) for engine in engines]
        if not any(cells):
            continue
        bound = bounds.get(name)
        ours = figure_of(results, "radixkv", name)
        share = "" if bound is None or ours is None else f"{reach(name, ours, bound):.0%}"
        label = f"{what}, {unit}" if unit else what
        table.add_row(name, label, *cells, "" if bound is None else f"{bound:{form}}", share)
    return table


def _cell(results: Results, engine: str, name: str, form: str) -> str:
    value = figure_of(results, engine, name)
    if value is not None:
        return f"{value:{form}}"
    return str(results[engine].get(FIGURES[name][1], {}).get("note", ""))


def reach(figure: str, ours: float, bound: float) -> float:
    """How much of the bound is reached, 1 being all: rates grow towards it, times fall to it."""
    return ours / bound if FIGURES[figure][3] == "tok/s" else bound / ours


def targets_table(results: Results) -> Table:
    """One row a target, with the ratio and whether it is met."""
    table = Table(title="Targets", title_justify="left")
    for column in ("", "radixkv against", "wanted", "ratio", ""):
        table.add_column(column)
    for verdict in (judge(parse(line), results) for line in TARGETS):
        target = verdict.target
        percent = target.figure == "s"
        wanted = f"{target.relation} " + (f"{target.bound:.0%}" if percent else f"{target.bound:g}")
        ratio = "" if verdict.ratio is None else f"{verdict.ratio:{'.1%' if percent else '.3g'}}"
        met = {True: "met", False: "not met", None: verdict.why}[verdict.met]
        table.add_row(
            target.figure,
            f"{FIGURES[target.figure][0].strip()} / {target.of}"
            if target.of
            else FIGURES[target.figure][0].strip(),
            wanted,
            ratio,
            met,
        )
    return table
