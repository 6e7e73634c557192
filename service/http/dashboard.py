"""GET /dashboard: one page that shows the cache, all in one file, from nobody else's server.

The page is the same for everybody and says nothing of anybody: it asks the other routes, with the
caller's own key. Knows files and headers; nothing of what the page shows.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
_SCRIPTS = ("base.js", "charts.js", "icicle.js", "explain.js", "main.js")


async def dashboard(request: web.Request) -> web.Response:
    """Show the page."""
    page, policy = _page()
    return web.Response(
        text=page,
        content_type="text/html",
        headers={
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


@functools.cache
def _page() -> tuple[str, str]:
    """Put the page together; return it and the policy that lets it run nothing but itself."""
    style = _read("style.css")
    script = "\n".join(map(_read, _SCRIPTS))
    page = _read("page.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return page, policy


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
