"""How a cache looks in a terminal: pressure, hit rates, pins and queues, and the tree.

Knows the answers of ``/v1/cache/*`` and ``rich``; nothing of HTTP. What comes from prompts is
stripped of control characters: it must not steer the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from radixkv.service.inspect_tree import branches_of, draw_tree, top_prefixes
from radixkv.service.inspect_words import UNKNOWN, duration, number, percent, safe, size_of, table

Json = Mapping[str, Any]
_BAR = 40
_TOP = 8
_WIDE = 110
"""Columns from which the pool and its numbers fit into one line."""


@dataclass(slots=True)
class Snapshot:
    """What one server said at one moment; parts that it does not have are None."""

    stats: Json
    tree: Json | None = None
    pins: Sequence[Json] | None = None


def render(
    snapshot: Snapshot, *, ascii_only: bool, depth: int = 4, lines: int = 40, width: int = 120
) -> RenderableType:
    """Draw a snapshot in ``width`` columns, its tree in at most so many ``lines``.

    ``ascii_only``: for pipes and files, without frames or colours.
    """
    stats, server = snapshot.stats, snapshot.stats["scope"] == "server"
    parts: list[RenderableType] = [*_header(stats, ascii_only, width)]
    for part in (
        _rates(stats, ascii_only),
        _queue(stats, ascii_only),
        _pins(snapshot.pins, ascii_only, by_tenant=server),
    ):
        if part is not None:
            parts += [Text(), part]
    if snapshot.tree is not None:
        branches = branches_of(snapshot.tree["nodes"])
        top = top_prefixes(branches, ascii_only, by_tenant=server)
        if top is not None:
            parts += [Text(), top]
        tree = draw_tree(snapshot.tree, branches, depth=depth, lines=lines, ascii_only=ascii_only)
        parts += [Text(), tree]
    return Group(*parts)


def _header(stats: Json, ascii_only: bool, width: int) -> list[RenderableType]:
    blocks, size = stats["blocks"], stats["block_size"]
    whose = "the whole server" if stats["scope"] == "server" else f"tenant {stats['tenant']}"
    title = Text(f"{stats['model']}: {whose}, blocks of {size} tokens", style="bold")
    lines: list[RenderableType] = [title]
    if blocks["total"]:
        lines.append(_pressure(blocks, ascii_only, width))
    else:
        quota = "no quota" if blocks["quota"] is None else f"quota {number(blocks['quota'])}"
        lines.append(
            Text(
                f"{number(blocks['resident'])} blocks resident, {number(blocks['used'])} in use "
                f"({quota}, floor {number(blocks['floor'] or 0)})"
            )
        )
    tokens, events = stats["tokens"], stats["events"]
    lines.append(
        Text(
            f"since the start: {number(tokens['hit'])} of {number(tokens['queried'])} tokens hit "
            f"({percent(stats['hit_rate'])}), {number(tokens['computed'])} computed, "
            f"{number(events['evicted'])} blocks evicted"
        )
    )
    waste = stats.get("waste")
    if waste:
        lines.append(
            Text(
                f"waste: {number(waste['reserved_tokens'])} tokens reserved, "
                f"{number(waste['tail_tokens'])} behind tails, "
                f"{size_of(waste['metadata_bytes'])} of metadata"
            )
        )
    return lines


def _pressure(blocks: Json, ascii_only: bool, width: int) -> Text:
    """Draw the pool: in use, kept for reuse, free."""
    total = blocks["total"]
    used = round(_BAR * blocks["used"] / total)
    cached = min(_BAR - used, round(_BAR * blocks["cached"] / total))
    marks = ("#", "=", ".") if ascii_only else ("█", "▒", "░")
    bar = Text("[")
    bar.append(marks[0] * used, style="red")
    bar.append(marks[1] * cached, style="green")
    bar.append(marks[2] * (_BAR - used - cached), style="dim")
    pinned = "" if blocks["pinned"] is None else f", {number(blocks['pinned'])} pinned"
    bar.append(
        ("] " if width >= _WIDE else "]\n")
        + f"{number(blocks['used'])} in use, {number(blocks['cached'])} cached, "
        f"{number(blocks['free'])} free of {number(total)} blocks{pinned}"
    )
    return bar


def _rates(stats: Json, ascii_only: bool) -> RenderableType | None:
    window = stats.get("window")
    if window is None:
        return None
    shown = table(
        f"hit rate of the last {duration(window['interval_s'])}, in tokens",
        ["tenant", "requests", "queried", "hit", "rate", "computed", "again", "evicted", "caused"],
        ascii_only,
    )
    for row in sorted(window["rows"], key=lambda row: -row["tokens"]["queried"])[:_TOP]:
        tokens, evictions = row["tokens"], row["evictions"] or {}
        shown.add_row(
            safe("(others)" if row["other"] else row["tenant"] or UNKNOWN),
            number(row["requests"]),
            number(tokens["queried"]),
            number(tokens["hit"]["device"] + (tokens["hit"]["host"] or 0)),
            percent(row["hit_rate"]),
            number(tokens["computed"]),
            number(tokens["recomputed_after_preemption"]),
            number(evictions.get("suffered")),
            number(evictions.get("caused")),
        )
    return shown if shown.row_count else Text("nothing was asked lately", style="dim")


def _queue(stats: Json, ascii_only: bool) -> RenderableType | None:
    rows = [row for row in stats.get("queue") or () if row["running"] or row["waiting"]]
    if not rows:
        return None
    shown = table("queue", ["tenant", "running", "waiting"], ascii_only)
    for row in sorted(rows, key=lambda row: -(row["running"] + row["waiting"]))[:_TOP]:
        shown.add_row(safe(row["tenant"]), number(row["running"]), number(row["waiting"]))
    return shown


def _pins(
    pins: Sequence[Json] | None, ascii_only: bool, *, by_tenant: bool
) -> RenderableType | None:
    if not pins:
        return None
    columns = ["tenant"] * by_tenant + ["name", "tokens", "blocks", "left"]
    shown = table("pins", columns, ascii_only)
    now = time.time()
    for pin in sorted(pins, key=lambda pin: -pin["pinned_tokens"])[:_TOP]:
        expires = pin["expires_at"]
        shown.add_row(
            *([safe(pin["tenant"])] if by_tenant else []),
            safe(pin["name"] or pin["id"]),
            number(pin["pinned_tokens"]),
            number(pin["blocks"]),
            "until unpinned" if expires is None else duration(max(0.0, expires - now)),
        )
    return shown
