"""How a cache looks in a terminal: pressure, hit rates, the tree, pins and queues.

Knows the answers of ``/v1/cache/*`` and ``rich``; nothing of HTTP. What comes from prompts is
stripped of control characters: it must not steer the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixkv.service.chat import printable

Json = Mapping[str, Any]
_BAR = 40
_TOP = 8
_SNIPPET = 48
_UNKNOWN = "-"


@dataclass(slots=True)
class Snapshot:
    """What one server said at one moment; parts that it does not have are None."""

    stats: Json
    tree: Json | None = None
    pins: Sequence[Json] | None = None


@dataclass(slots=True)
class _Branch:
    """A node, the nodes below it, and how many paths end there."""

    node: Json
    children: list[_Branch] = field(default_factory=list)
    paths: int = 1


def render(snapshot: Snapshot, *, ascii_only: bool, depth: int = 4) -> RenderableType:
    """Draw a snapshot. ``ascii_only``: for pipes and files, without frames or colours."""
    parts: list[RenderableType] = [*_header(snapshot.stats, ascii_only)]
    for part in (
        _rates(snapshot.stats, ascii_only),
        _queue(snapshot.stats, ascii_only),
        _pins(snapshot.pins, ascii_only),
    ):
        if part is not None:
            parts += [Text(), part]
    if snapshot.tree is not None:
        branches = branches_of(snapshot.tree["nodes"])
        top = _top_prefixes(branches, ascii_only)
        if top is not None:
            parts += [Text(), top]
        parts += [Text(), _tree(snapshot.tree, branches, depth, ascii_only)]
    return Group(*parts)


def branches_of(nodes: Sequence[Json]) -> list[_Branch]:
    """Build the roots of the tree from its nodes, parents before children; the widest first."""
    found = [_Branch(node) for node in nodes]
    tops: list[_Branch] = []
    for branch in found:
        parent = branch.node["parent"]
        (tops if parent is None else found[parent].children).append(branch)
    for branch in reversed(found):
        branch.children.sort(key=_width)
        below = sum(child.paths for child in branch.children)
        # What was left out is at least one path, and at most as many as it has nodes.
        branch.paths = below or (
            branch.node["subtree_nodes"] if branch.node["kind"] == "other" else 1
        )
    tops.sort(key=_width)
    return tops


def _width(branch: _Branch) -> tuple[bool, int]:
    return branch.node["kind"] == "other", -branch.node["subtree_tokens"]


def _header(stats: Json, ascii_only: bool) -> list[RenderableType]:
    blocks, size = stats["blocks"], stats["block_size"]
    whose = "the whole server" if stats["scope"] == "server" else f"tenant {stats['tenant']}"
    title = Text(f"{stats['model']}: {whose}, blocks of {size} tokens", style="bold")
    lines: list[RenderableType] = [title]
    if blocks["total"]:
        lines.append(_pressure(blocks, ascii_only))
    else:
        quota = "no quota" if blocks["quota"] is None else f"quota {blocks['quota']}"
        lines.append(
            Text(
                f"{blocks['resident']} blocks resident, {blocks['used']} in use "
                f"({quota}, floor {blocks['floor'] or 0})"
            )
        )
    tokens, events = stats["tokens"], stats["events"]
    lines.append(
        Text(
            f"since the start: {_number(tokens['hit'])} of {_number(tokens['queried'])} tokens hit "
            f"({_percent(stats['hit_rate'])}), {_number(tokens['computed'])} computed, "
            f"{_number(events['evicted'])} blocks evicted"
        )
    )
    waste = stats.get("waste")
    if waste:
        lines.append(
            Text(
                f"waste: {_number(waste['reserved_tokens'])} tokens reserved, "
                f"{_number(waste['tail_tokens'])} behind tails, "
                f"{_bytes(waste['metadata_bytes'])} of metadata"
            )
        )
    return lines


def _pressure(blocks: Json, ascii_only: bool) -> Text:
    """Draw the pool: in use, kept for reuse, free."""
    total = blocks["total"]
    used = round(_BAR * blocks["used"] / total)
    cached = min(_BAR - used, round(_BAR * blocks["cached"] / total))
    marks = ("#", "=", ".") if ascii_only else ("█", "▒", "░")
    bar = Text("[")
    bar.append(marks[0] * used, style="red")
    bar.append(marks[1] * cached, style="green")
    bar.append(marks[2] * (_BAR - used - cached), style="dim")
    pinned = "" if blocks["pinned"] is None else f", {_number(blocks['pinned'])} pinned"
    bar.append(
        f"] {_number(blocks['used'])} in use, {_number(blocks['cached'])} cached, "
        f"{_number(blocks['free'])} free of {_number(total)} blocks{pinned}"
    )
    return bar


def _rates(stats: Json, ascii_only: bool) -> RenderableType | None:
    window = stats.get("window")
    if window is None:
        return None
    table = _table(
        f"hit rate of the last {_duration(window['interval_s'])}, in tokens",
        ["tenant", "requests", "queried", "hit", "rate", "computed", "again", "evicted", "caused"],
        ascii_only,
    )
    for row in sorted(window["rows"], key=lambda row: -row["tokens"]["queried"])[:_TOP]:
        tokens, evictions = row["tokens"], row["evictions"] or {}
        table.add_row(
            _safe("(others)" if row["other"] else row["tenant"] or _UNKNOWN),
            _number(row["requests"]),
            _number(tokens["queried"]),
            _number(tokens["hit"]["device"]),
            _percent(row["hit_rate"]),
            _number(tokens["computed"]),
            _number(tokens["recomputed_after_preemption"]),
            _number(evictions.get("suffered")),
            _number(evictions.get("caused")),
        )
    return table if table.row_count else Text("nothing was asked lately", style="dim")


def _queue(stats: Json, ascii_only: bool) -> RenderableType | None:
    rows = [row for row in stats.get("queue") or () if row["running"] or row["waiting"]]
    if not rows:
        return None
    table = _table("queue", ["tenant", "running", "waiting"], ascii_only)
    for row in sorted(rows, key=lambda row: -(row["running"] + row["waiting"]))[:_TOP]:
        table.add_row(_safe(row["tenant"]), _number(row["running"]), _number(row["waiting"]))
    return table


def _pins(pins: Sequence[Json] | None, ascii_only: bool) -> RenderableType | None:
    if not pins:
        return None
    table = _table("pins", ["name", "tokens", "blocks", "left"], ascii_only)
    now = time.time()
    for pin in sorted(pins, key=lambda pin: -pin["pinned_tokens"])[:_TOP]:
        expires = pin["expires_at"]
        table.add_row(
            _safe(pin["name"] or pin["id"]),
            _number(pin["pinned_tokens"]),
            _number(pin["blocks"]),
            "until unpinned" if expires is None else _duration(max(0.0, expires - now)),
        )
    return table


def _top_prefixes(branches: Sequence[_Branch], ascii_only: bool) -> RenderableType | None:
    """List what most paths share, by the tokens that sharing saves."""
    found: list[tuple[int, _Branch]] = []
    stack = list(branches)
    while stack:
        branch = stack.pop()
        stack += branch.children
        if branch.paths > 1 and branch.node["kind"] == "node":
            found.append((branch.node["tokens"] * (branch.paths - 1), branch))
    if not found:
        return None
    table = _table("top prefixes", ["tokens", "paths", "saved", "in use", "text"], ascii_only)
    for saved, branch in sorted(found, key=lambda item: -item[0])[:_TOP]:
        node = branch.node
        table.add_row(
            _number(node["start"] + node["tokens"]),
            _number(branch.paths),
            _number(saved),
            _number(node["references"]),
            _safe(_snippet(node)),
        )
    return table


def _tree(tree: Json, branches: Sequence[_Branch], depth: int, ascii_only: bool) -> RenderableType:
    num_nodes = sum(branch.node["subtree_nodes"] for branch in branches)
    tokens = sum(branch.node["subtree_tokens"] for branch in branches)
    more = "" if tree["complete"] else ", and more that were not counted"
    root = Tree(Text(f"tree: {_number(tokens)} tokens in {num_nodes} nodes{more}", style="bold"))
    _grow(root, branches, depth + 1)
    return Text("\n".join(_plain(root, ""))) if ascii_only else root


def _grow(stem: Tree, branches: Sequence[_Branch], depth: int) -> None:
    for branch in branches[:_TOP]:
        twig = stem.add(_label(branch))
        if depth > 1:
            _grow(twig, branch.children, depth - 1)
        elif branch.children:
            twig.add(Text(f"... {branch.paths} paths", style="dim"))
    if len(branches) > _TOP:
        stem.add(Text(f"... {len(branches) - _TOP} more", style="dim"))


def _label(branch: _Branch) -> Text:
    node = branch.node
    if node["kind"] == "root":
        whose = "public" if node["tenant"] is None else node["tenant"]
        label = Text(f"{printable(whose)} {(node['identity'] or '')[:8]}", style="cyan")
        label.append(f"  {_number(node['subtree_tokens'])} tokens", style="default")
        return label
    if node["kind"] == "other":
        return Text(f"... {node['subtree_nodes']} nodes, {node['subtree_tokens']} tokens", "dim")
    label = Text(f"{node['tokens']} tokens")
    if node["references"]:
        label.append(f", {node['references']} using", style="red")
    elif node["idle_s"] is not None:
        label.append(f", idle {_duration(node['idle_s'])}", style="dim")
    if node["text"]:
        label.append(f"  {_snippet(node)}", style="green")
    return label


def _plain(tree: Tree, indent: str) -> list[str]:
    lines = [indent + str(tree.label)]
    for child in tree.children:
        lines += _plain(child, indent + "  ")
    return lines


def _table(title: str, columns: Sequence[str], ascii_only: bool) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None if ascii_only else box.SIMPLE,
        pad_edge=False,
    )
    for name in columns:
        left = name in ("tenant", "name", "text")
        table.add_column(
            name,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis" if name == "text" else "fold",
        )
    return table


def _snippet(node: Json) -> str:
    text = printable((node["text"] or "").replace("\n", "\\n").replace("\t", " "))
    return text if len(text) <= _SNIPPET else text[: _SNIPPET - 3] + "..."


def _safe(text: str) -> str:
    return escape(printable(text))


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"


def _percent(rate: float | None) -> str:
    return _UNKNOWN if rate is None else f"{100 * rate:.1f} %"


def _bytes(size: int | None) -> str:
    if size is None:
        return _UNKNOWN
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.0f} KiB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
