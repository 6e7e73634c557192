"""``radixkv inspect``: asks a running server about its cache and shows it, once or again and again.

Knows HTTP, flags and terminals; what things look like is in ``inspect_view``.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from radixkv.service.chat import server_url
from radixkv.service.inspect_view import Snapshot, render

_TIMEOUT_S = 10.0
_PIPE_WIDTH = 120
_TREE_LINES = 40


class InspectError(Exception):
    """Nothing can be shown; the message says why and what to do."""


class CacheClient:
    """Asks one server. Raises InspectError, at once if nothing answers at ``url``."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = server_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def snapshot(self, *, window: str, limit: int, depth: int) -> Snapshot:
        """Ask for all that is shown. What a server of another version does not have is left out."""
        stats = self._get(f"/v1/cache/stats?window={window}&by=tenant")
        tree = self._try(f"/v1/cache/tree?depth={depth}&limit={limit}&text=true")
        pins = self._try("/v1/cache/pins")
        return Snapshot(stats, tree, None if pins is None else pins.get("data"))

    def _try(self, path: str) -> Any:
        try:
            return self._get(path)
        except _Absent:
            return None

    def _get(self, path: str) -> Any:
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            raise self._explain(e, path) from e
        except json.JSONDecodeError as e:
            raise InspectError(f"{self.url} does not answer like a radixkv server") from e
        except (OSError, ValueError, http.client.HTTPException) as e:
            reason = getattr(e, "reason", None) or e
            raise _Gone(
                f"no server answers at {self.url} ({reason}); start one with: radixkv serve"
            ) from e

    def _explain(self, error: urllib.error.HTTPError, path: str) -> InspectError:
        try:
            detail = json.load(error)["error"]
            message, code = str(detail["message"]), detail.get("code")
        except (ValueError, LookupError, TypeError, AttributeError):
            return InspectError(f"{self.url} does not answer like a radixkv server")
        if error.code == 401 and self._headers:
            return InspectError(f"{self.url} does not take this key: {message}")
        if error.code == 401:
            return InspectError(
                f"{self.url} asks for a key: give it with --api-key or in RADIXKV_API_KEY"
            )
        if error.code == 404 and code == "not_found":
            return _Absent(f"{self.url} has no {path.partition('?')[0]}")
        kind = _Gone if error.code == 503 else InspectError
        return kind(f"{self.url} says: {message}")


class _Gone(InspectError):
    """Nothing answers, or nothing yet; it may soon."""


class _Absent(InspectError):
    """The server has no such route."""


def show(
    client: CacheClient,
    *,
    console: Console | None = None,
    window: str = "5m",
    limit: int = 2000,
    depth: int = 4,
    watch_s: float | None = None,
    rounds: int | None = None,
) -> None:
    """Show the cache, once or every ``watch_s`` seconds (``rounds`` times, if that is given).

    In a terminal a watched view is redrawn in place, as large as the screen; in a pipe one follows
    the other, as plain text. A server that goes away while it is watched is waited for.
    """
    console = console or Console(highlight=False)
    terminal = console.is_terminal
    if not terminal:
        console = Console(file=console.file, width=_PIPE_WIDTH, highlight=False, no_color=True)

    def ask() -> Snapshot:
        return client.snapshot(window=window, limit=limit, depth=max(depth, 1))

    def draw(snapshot: Snapshot, lines: int = _TREE_LINES) -> RenderableType:
        return render(
            snapshot, ascii_only=not terminal, depth=depth, lines=lines, width=console.width
        )

    snapshot = ask()  # what is wrong from the beginning is said on a plain screen
    if watch_s is None:
        console.print(draw(snapshot))
        return

    def fit(snapshot: Snapshot, trouble: str) -> RenderableType:
        """Draw as much of the tree as the screen has room for."""
        last = Text(f"{trouble or time.strftime('%H:%M:%S')}; Ctrl-C ends", "red" * bool(trouble))
        used = len(console.render_lines(Group(draw(snapshot, lines=0), last)))
        return Group(last, draw(snapshot, lines=max(0, console.height - used - 1)))

    def looks() -> Iterator[tuple[Snapshot, str]]:
        """Look again and again; a server that goes away is waited for, with what was seen last."""
        seen = snapshot
        for _ in count(1) if rounds is None else range(1, rounds):
            time.sleep(watch_s)
            try:
                seen = ask()
                yield seen, ""
            except _Gone as e:
                yield seen, f"{e}; trying again"

    if terminal:
        with Live(fit(snapshot, ""), console=console, auto_refresh=False, screen=True) as live:
            for seen, trouble in looks():
                live.update(fit(seen, trouble), refresh=True)
        return
    console.print(draw(snapshot))
    for seen, trouble in looks():
        console.print()
        console.print(Text(trouble) if trouble else draw(seen))
