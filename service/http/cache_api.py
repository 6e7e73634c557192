"""GET /v1/cache/stats and POST /v1/cache/reset: numbers only, never tokens or text.

They are of all tenants together, so where callers have keys it takes an admin's.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from radixkv.service.http.auth import only_admins, require_admin
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply


class Blocks(TypedDict):
    """Blocks of the pool by state; free + cached + used = total."""

    total: int
    free: int
    cached: int
    used: int


class CacheTokens(TypedDict):
    """Token counters since the start; none ever falls, and hit <= queried."""

    queried: int
    hit: int
    hit_inside_a_block: int
    computed: int
    recomputed_after_preemption: int


class CacheEvents(TypedDict):
    """Block counters since the start."""

    published: int
    deduplicated: int
    evicted: int
    copied_on_write: int
    resets: int


class CacheStatsReply(TypedDict):
    """What the cache holds and what it was good for."""

    object: Literal["cache.stats"]
    model: str
    enabled: bool
    deterministic: bool
    decoder: Literal["native", "generic"]
    block_size: int
    blocks: Blocks
    tokens: CacheTokens
    events: CacheEvents
    nodes: int
    identities: int
    hit_rate: float | None
    requests_running: int
    requests_waiting: int


class CacheResetReply(TypedDict):
    """What a reset freed."""

    object: Literal["cache.reset"]
    freed_blocks: int


async def cache_stats(request: web.Request) -> web.Response:
    """Show the counters as of the engine's last step."""
    only_admins(request)
    engine = request.app[SERVING].engine
    stats = engine.stats()
    cache = stats.cache
    queried = cache.queried_tokens
    reply: CacheStatsReply = {
        "object": "cache.stats",
        "model": engine.model_name,
        "enabled": engine.config.prefix_cache,
        "deterministic": engine.config.deterministic,
        "decoder": engine.decoder,
        "block_size": engine.config.block_size,
        "blocks": {
            "total": stats.num_blocks,
            "free": stats.free_blocks,
            "cached": stats.cached_blocks,
            "used": stats.used_blocks,
        },
        "tokens": {
            "queried": queried,
            "hit": cache.hit_tokens,
            "hit_inside_a_block": cache.partial_hit_tokens,
            "computed": stats.prompt_tokens_computed_total,
            "recomputed_after_preemption": stats.recomputed_tokens_total,
        },
        "events": {
            "published": cache.published_blocks,
            "deduplicated": cache.deduplicated_blocks,
            "evicted": cache.evicted_blocks,
            "copied_on_write": cache.cow_copies,
            "resets": cache.resets,
        },
        "nodes": cache.nodes,
        "identities": cache.identities,
        "hit_rate": round(cache.hit_tokens / queried, 6) if queried else None,
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
    }
    return json_reply(reply)


async def cache_reset(request: web.Request) -> web.Response:
    """Forget everything; 409 with the reason while requests run."""
    require_admin(request)
    engine = request.app[SERVING].engine
    freed = await asyncio.to_thread(engine.cache.reset)
    reply: CacheResetReply = {"object": "cache.reset", "freed_blocks": freed}
    return json_reply(reply)
