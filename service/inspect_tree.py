"""The radix tree in a terminal: what most paths share, and the widest branches of the tree.

Knows the nodes of ``/v1/cache/tree`` and ``rich``; nothing of HTTP. Of any number of nodes it draws
a bounded number of lines.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from radixkv.service.chat import printable
from radixkv.service.inspect_words import counted, duration, number, safe, table

Json = Mapping[str, Any]
_TOP = 8
_SNIPPET = 48


@dataclass(slots=True)
class Branch:
    """A node, the nodes below it, and how many paths end there."""

    node: Json
    children: list[Branch] = field(default_factory=list)
    paths: int = 1


def branches_of(nodes: Sequence[Json]) -> list[Branch]:
    """Build the roots of the tree from its nodes, parents before children; the widest first."""
    found = [Branch(node) for node in nodes]
    tops: list[Branch] = []
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


def _width(branch: Branch) -> tuple[bool, int]:
    return branch.node["kind"] == "other", -branch.node["subtree_tokens"]


def top_prefixes(
    branches: Sequence[Branch], ascii_only: bool, *, by_tenant: bool
) -> RenderableType | None:
    """List what most paths share, by the tokens that sharing saves; None if nothing is shared."""
    found: list[tuple[int, str | None, Branch]] = []
    stack = list(branches)
    while stack:
        branch = stack.pop()
        stack += branch.children
        if branch.paths > 1 and branch.node["kind"] == "node":
            saved = branch.node["tokens"] * (branch.paths - 1)
            found.append((saved, branch.node["tenant"], branch))
    if not found:
        return None
    found = sorted(found, key=lambda item: -item[0])[:_TOP]
    readable = any(branch.node["text"] for *_, branch in found)
    columns = ["tokens", "paths", "saved", "in use"]
    columns += ["tenant"] * by_tenant + ["text"] * readable
    shown = table("top prefixes", columns, ascii_only)
    for saved, tenant, branch in found:
        node = branch.node
        cells = [node["start"] + node["tokens"], branch.paths, saved, node["references"]]
        whose = [safe("public" if tenant is None else tenant)] if by_tenant else []
        text = [safe(_snippet(node))] if readable else []
        shown.add_row(*map(number, cells), *whose, *text)
    return shown


def draw_tree(
    reply: Json, branches: Sequence[Branch], *, depth: int, lines: int, ascii_only: bool
) -> RenderableType:
    """Draw ``branches`` of a reply, the widest first, to ``depth`` levels below the roots.

    In about as many lines as given and one more; what is left out is summed up where it hangs.
    """
    num_nodes = sum(branch.node["subtree_nodes"] for branch in branches)
    tokens = sum(branch.node["subtree_tokens"] for branch in branches)
    more = "" if reply["complete"] else ", and more that were not counted"
    head = f"tree: {number(tokens)} tokens in {counted(num_nodes, 'node')}{more}"
    root = Tree(_line(head, "bold"))
    _grow(root, branches, _chosen(branches, depth + 1, lines))
    return Text("\n".join(_plain(root, ""))) if ascii_only else root


def _chosen(branches: Sequence[Branch], levels: int, lines: int) -> set[int]:
    """Return the ids of the branches that have room, each below one that has: the widest first."""
    chosen: set[int] = set()
    waiting: list[tuple[int, int, int, Branch]] = []

    def offer(level: int, some: Sequence[Branch]) -> None:
        for branch in [b for b in some if b.node["kind"] != "other"][:_TOP]:
            item = (-branch.node["subtree_tokens"], len(waiting) + len(chosen), level, branch)
            heapq.heappush(waiting, item)

    offer(1, branches)
    room = lines - 1  # what is left out takes a line wherever there is any
    while waiting:
        *_, level, branch = heapq.heappop(waiting)
        room -= 2 if branch.children else 1
        if room < 0:
            break
        chosen.add(id(branch))
        if level < levels:
            offer(level + 1, branch.children)
    return chosen


def _grow(stem: Tree, branches: Sequence[Branch], chosen: set[int]) -> None:
    for branch in branches:
        if id(branch) in chosen:
            _grow(stem.add(_label(branch)), branch.children, chosen)
    rest = [branch.node for branch in branches if id(branch) not in chosen]
    if rest:
        nodes = sum(node["subtree_nodes"] for node in rest)
        tokens = sum(node["subtree_tokens"] for node in rest)
        stem.add(_line(f"... {counted(nodes, 'node')}, {number(tokens)} tokens", "dim"))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _label(branch: Branch) -> Text:
    node = branch.node
    if node["kind"] == "root":
        whose = "public" if node["tenant"] is None else node["tenant"]
        label = _line(f"{printable(whose)} {(node['identity'] or '')[:8]}", "cyan")
        label.append(f"  {number(node['subtree_tokens'])} tokens", style="default")
        return label
    label = _line(counted(node["tokens"], "token"))
    if node["references"]:
        label.append(f", {node['references']} using", style="red")
    elif node["idle_s"] is not None:
        label.append(f", idle {duration(node['idle_s'])}", style="dim")
    if node["text"]:
        label.append(f"  {_snippet(node)}", style="green")
    return label


def _plain(tree: Tree, indent: str) -> list[str]:
    lines = [indent + str(tree.label)]
    for child in tree.children:
        lines += _plain(child, indent + "  ")
    return lines


def _snippet(node: Json) -> str:
    text = printable((node["text"] or "").replace("\n", "\\n").replace("\t", " "))
    return text if len(text) <= _SNIPPET else text[: _SNIPPET - 3] + "..."
