"""Words, numbers and tables as ``radixkv inspect`` writes them.

Knows ``rich`` and units; nothing of caches. What comes from prompts or names is stripped of control
characters: it must not steer the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from radixkv.service.chat import printable

UNKNOWN = "-"
_NAME_CHARS = 32


def table(title: str, columns: Sequence[str], ascii_only: bool) -> Table:
    """Return an empty table; names and texts stand left, numbers right."""
    empty = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None if ascii_only else box.SIMPLE,
        pad_edge=False,
        collapse_padding=not ascii_only,  # so that nine columns fit into 80
        expand="text" in columns,
    )
    for name in columns:
        left = name in ("tenant", "name", "text")
        empty.add_column(
            name,
            justify="left" if left else "right",
            ratio=1 if name == "text" else None,  # what room the numbers leave
            no_wrap=True,
            overflow="crop" if ascii_only else "ellipsis",
            max_width=_NAME_CHARS if left and name != "text" else None,
        )
    return empty


def safe(text: str) -> str:
    """Return text that neither steers the terminal nor is taken for markup."""
    return escape(printable(text))


def number(value: float | None) -> str:
    """Write a count; 12.3M from ten million on."""
    if value is None:
        return UNKNOWN
    return f"{value / 1e6:,.1f}M" if value >= 1e7 else f"{value:,.0f}"


def counted(number: int, unit: str) -> str:
    """Say how many there are of what: 1 path, 2 paths."""
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def percent(rate: float | None) -> str:
    """Write a share of one."""
    return UNKNOWN if rate is None else f"{100 * rate:.1f} %"


def size_of(size: int | None) -> str:
    """Write a number of bytes."""
    if size is None:
        return UNKNOWN
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.0f} KiB"


def duration(seconds: float | None) -> str:
    """Write a number of seconds."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
