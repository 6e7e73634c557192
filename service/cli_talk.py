"""How commands speak on stderr, which leaves stdout to answers and tables; knows no command."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console


def say(message: str) -> None:
    """Say one line."""
    Console(stderr=True, highlight=False).print(message, markup=False, soft_wrap=True)


def fail(message: str, *, code: int = 2) -> NoReturn:
    """Say what is wrong, without a trace, and exit."""
    Console(stderr=True, highlight=False).print("[red]radixkv:[/red] ", end="")
    say(message)
    raise typer.Exit(code)
