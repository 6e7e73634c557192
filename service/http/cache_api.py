"""POST /v1/cache/reset: an admin empties the cache of everybody."""

from __future__ import annotations

import asyncio
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from radixkv.service.http.auth import require_admin
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply


class CacheResetReply(TypedDict):
    """What a reset freed."""

    object: Literal["cache.reset"]
    freed_blocks: int


async def cache_reset(request: web.Request) -> web.Response:
    """Forget everything; 409 with the reason while requests run."""
    require_admin(request)
    engine = request.app[SERVING].engine
    freed = await asyncio.to_thread(engine.cache.reset)
    reply: CacheResetReply = {"object": "cache.reset", "freed_blocks": freed}
    return json_reply(reply)
