"""GET /v1/cache/stats: what the cache holds, what it gave since the start and in a window of time.

Numbers only. An admin's are of the whole server, anybody else's of the caller's own part; what is
not known, or is another's affair, is null and never 0.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.history import MAX_WINDOW_S, REASONS, By, Row, Window
from radixkv.service.http.auth import Caller, caller_of
from radixkv.service.http.cache_stats_shapes import (
    Blocks,
    CacheCounts,
    CacheStatsReply,
    CacheTokens,
    Evictions,
    Quantiles,
    ResidencyReply,
    WindowReply,
    WindowRow,
)
from radixkv.service.http.queries import check_names, choice, seconds
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply

if TYPE_CHECKING:
    from radixkv.accounts import AccountStats
    from radixkv.service.engine.cache_view import Inside
    from radixkv.service.engine.counters import EngineStats
    from radixkv.service.engine.engine import Engine
    from radixkv.service.tenants import Roster

DEFAULT_WINDOW_S = 300.0
_SMALL_TREE = 2000
"""Nodes that are walked in about a millisecond, so that the numbers can be fresh."""


async def cache_stats(request: web.Request) -> web.Response:
    """Show the counters, and with ``window`` or ``by`` what was counted lately.

    An admin who asks for no window gets the engine's last word without waiting; all else waits for
    the end of a step.
    """
    check_names(request, ("window", "by"))
    window_s = seconds(request, "window", most=MAX_WINDOW_S)
    by = choice(request, "by", ("tenant", "identity", "prompt_cache_key"))
    caller, engine = caller_of(request), request.app[SERVING].engine
    wanted = window_s is not None or by is not None
    inside: Inside | None = None
    if wanted or not caller.is_admin:
        max_age_s = 0.0 if engine.cache.stats().nodes <= _SMALL_TREE else 2.0
        inside = await asyncio.to_thread(engine.cache.inside, max_age_s)
    reply = _reply(engine, caller, inside, request.app[SERVING].gate.roster)
    if wanted:
        shown: By = by or "tenant"  # type: ignore[assignment]  # one of the words above
        asked_s = window_s or DEFAULT_WINDOW_S
        tenants = None if caller.is_admin else frozenset({caller.tenant})
        window = engine.cache.history.read(asked_s, shown, tenants)
        reply["window"] = _window(window, asked_s, shown)
        if inside is not None and caller.is_admin:
            waste = inside.waste
            reply["waste"] = {
                "reserved_tokens": waste.reserved_tokens,
                "tail_tokens": waste.tail_tokens,
                "metadata_bytes": waste.metadata_bytes,
            }
            reply["residency"] = _residency(engine)
    return json_reply(reply)


def _residency(engine: Engine) -> ResidencyReply | None:
    histograms, quantiles = engine.cache.residency, engine.cache.residency_quantiles
    if not histograms or not quantiles:
        return None

    def of(name: str) -> Quantiles:
        found = quantiles[name]
        return {
            "samples": histograms[name].count,
            "p50": _rounded(found.get(0.5)),
            "p90": _rounded(found.get(0.9)),
            "p99": _rounded(found.get(0.99)),
        }

    return {
        "block_lifetime_s": of("lifetime"),
        "idle_before_evict_s": of("idle"),
        "reuse_gap_s": of("reuse_gap"),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _reply(
    engine: Engine, caller: Caller, inside: Inside | None, roster: Roster
) -> CacheStatsReply:
    stats = engine.stats()
    if caller.is_admin:
        blocks, tokens, events = _of_server(stats, inside)
        running, waiting = stats.num_running, stats.num_waiting
    else:
        assert inside is not None
        account = inside.account(caller.tenant)
        blocks, tokens, events = _of_tenant(stats, account, caller.tenant)
        mine = stats.by_tenant.get(caller.tenant)
        running, waiting = (mine.num_running, mine.num_waiting) if mine is not None else (0, 0)
    queried = tokens["queried"]
    return {
        "object": "cache.stats",
        "model": engine.model_name,
        "scope": "server" if caller.is_admin else "tenant",
        "tenant": None if caller.is_admin else caller.tenant,
        "enabled": engine.config.prefix_cache,
        "deterministic": engine.config.deterministic,
        "decoder": engine.decoder,
        "block_size": engine.config.block_size,
        "blocks": blocks,
        "tokens": tokens,
        "events": events,
        "nodes": stats.cache.nodes if caller.is_admin else None,
        "identities": stats.cache.identities if caller.is_admin else None,
        "hit_rate": round(tokens["hit"] / queried, 6) if queried else None,
        "requests_running": running,
        "requests_waiting": waiting,
        "queue": [
            {
                "tenant": name,
                "weight": roster[name].weight if name in roster else None,
                "running": of.num_running,
                "waiting": of.num_waiting,
            }
            for name, of in sorted(stats.by_tenant.items())
            if caller.is_admin or name == caller.tenant
        ],
        "window": None,
        "waste": None,
        "residency": None,
    }


def _of_server(
    stats: EngineStats, inside: Inside | None
) -> tuple[Blocks, CacheTokens, CacheCounts]:
    cache = stats.cache
    pinned = None if inside is None else sum(a.pinned_blocks for a in inside.accounts)
    return (
        {
            "total": stats.num_blocks,
            "free": stats.free_blocks,
            "cached": stats.cached_blocks,
            "used": stats.used_blocks,
            "resident": cache.cached_blocks,
            "pinned": pinned,
            "quota": None,
            "floor": None,
        },
        {
            "queried": cache.queried_tokens,
            "hit": cache.hit_tokens,
            "hit_inside_a_block": cache.partial_hit_tokens,
            "computed": stats.prompt_tokens_computed_total,
            "recomputed_after_preemption": stats.recomputed_tokens_total,
        },
        {
            "published": cache.published_blocks,
            "deduplicated": cache.deduplicated_blocks,
            "evicted": cache.evicted_blocks,
            "evictions_caused": cache.evicted_blocks,
            "copied_on_write": cache.cow_copies,
            "resets": cache.resets,
        },
    )


def _of_tenant(
    stats: EngineStats, account: AccountStats | None, tenant: str
) -> tuple[Blocks, CacheTokens, CacheCounts]:
    mine = stats.by_tenant.get(tenant)
    return (
        {
            "total": None,
            "free": None,
            "cached": account.evictable if account else 0,
            "used": account.blocks - account.evictable if account else 0,
            "resident": account.blocks if account else 0,
            "pinned": account.pinned_blocks if account else 0,
            "quota": account.quota if account else None,
            "floor": account.floor if account else None,
        },
        {
            "queried": account.queried_tokens if account else 0,
            "hit": account.hit_tokens if account else 0,
            "hit_inside_a_block": None,
            "computed": mine.prompt_tokens_computed_total if mine else 0,
            "recomputed_after_preemption": mine.recomputed_tokens_total if mine else 0,
        },
        {
            "published": None,
            "deduplicated": None,
            "evicted": account.evicted_suffered if account else 0,
            "evictions_caused": account.evicted_caused if account else 0,
            "copied_on_write": None,
            "resets": None,
        },
    )


def _window(window: Window, asked_s: float, by: By) -> WindowReply:
    epoch_s = time.time() - window.end_s
    return {
        "asked_s": asked_s,
        "from_time": round(window.start_s + epoch_s, 3),
        "to_time": round(window.end_s + epoch_s, 3),
        "interval_s": round(window.end_s - window.start_s, 3),
        "resolution_s": window.slot_s,
        "denominator": "queried_tokens",
        "by": by,
        "rows": [_row(row, by) for row in window.rows],
    }


def _row(row: Row, by: By) -> WindowRow:
    counts, rate, key = row.counts, row.hit_rate, row.key
    evictions: Evictions | None = None
    if "evicted_suffered_blocks" in counts:
        evictions = {
            "suffered": counts["evicted_suffered_blocks"],
            "caused": counts["evicted_caused_blocks"],
        }
    return {
        "tenant": row.tenant if isinstance(row.tenant, str) else None,
        "identity": key.digest().hex() if isinstance(key, CacheIdentity) else None,
        "prompt_cache_key": key if isinstance(key, str) else None,
        "other": not isinstance(row.tenant, str)
        or not (key is None or isinstance(key, str | CacheIdentity)),
        "requests": counts["requests"],
        "tokens": {
            "queried": counts["queried_tokens"],
            "hit": {"device": counts["hit_tokens"], "host": None},
            "found_later": counts["found_later_tokens"],
            "computed": counts["computed_tokens"],
            "recomputed_after_preemption": counts["recomputed_tokens"],
            "restored_after_preemption": counts["restored_tokens"],
            "generated": counts["generated_tokens"],
            "lost_at_a_border": counts.get("below_block"),
        },
        "hit_rate": None if rate is None else round(rate, 6),
        "preemptions": counts["preemptions"],
        "evictions": evictions,
        "missed": {reason: n for reason in REASONS if (n := counts[reason])} if evictions else None,
    }
