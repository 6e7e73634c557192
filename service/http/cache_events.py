"""GET /v1/cache/events: what happens in the cache, as server-sent events with counts.

Never text, tokens or ids. A caller hears of its own part; an admin of everybody's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from radixkv.errors import Overloaded
from radixkv.service.engine.cache_events import CacheEvent, Listener
from radixkv.service.http.auth import caller_of
from radixkv.service.http.queries import check_names
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import EventStream

MAX_LISTENERS = 16
"""Of one tenant; more are refused."""


class Listeners:
    """Who listens, by tenant."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[Listener]] = defaultdict(set)

    def of(self, tenant: str) -> set[Listener]:
        """Return those of one tenant, to be changed."""
        return self._of[tenant]

    def wake(self) -> None:
        """Let all look whether the server stops."""
        for listeners in self._of.values():
            for listener in listeners:
                listener.ready.set()


LISTENERS = web.AppKey("LISTENERS", Listeners)


class EventReply(TypedDict):
    """Something that happened. `counts` has the units in its names' meaning: `blocks` or `tokens`.

    `stored`, `evicted`, `pinned`, `unpinned`, `expired` and `cleared` count blocks; `hit` has
    `tokens` of `queried_tokens`; `preempted` the tokens of the request that was put back.
    """

    object: Literal["cache.event"]
    type: Literal[
        "stored", "hit", "evicted", "pinned", "unpinned", "expired", "preempted", "cleared"
    ]
    tenant: str
    time: float
    counts: dict[str, int]


class DroppedReply(TypedDict):
    """Events that came while this client's queue was full."""

    object: Literal["cache.event"]
    type: Literal["dropped"]
    counts: dict[str, int]


async def cache_events(request: web.Request) -> web.StreamResponse:
    """Send events until the client goes, its key ends, or the server stops."""
    check_names(request, ())
    serving, caller = request.app[SERVING], caller_of(request)
    cache = serving.engine.cache
    mine = request.app[LISTENERS].of(caller.tenant)
    if len(mine) >= MAX_LISTENERS:
        raise Overloaded(
            f"{len(mine)} connections of yours listen to events, as many as may", retry_after_s=5
        )
    listener = cache.listen(None if caller.is_admin else frozenset({caller.tenant}))
    mine.add(listener)
    try:
        events = EventStream(request, ping_s=serving.ping_s)
        async with events:
            while not serving.draining:
                await listener.ready.wait()
                if not serving.gate.still_admits(request):
                    break
                found, dropped = listener.take()
                for event in found:
                    await events.send(_reply(event))
                if dropped:
                    lost: DroppedReply = {
                        "object": "cache.event",
                        "type": "dropped",
                        "counts": {"events": dropped},
                    }
                    await events.send(lost)
            await events.done()
        return events.response
    finally:
        mine.discard(listener)
        cache.stop_listening(listener)


async def end_listening(app: web.Application) -> None:
    """Let those that listen end, as the server stops."""
    app[LISTENERS].wake()


def _reply(event: CacheEvent) -> EventReply:
    return {
        "object": "cache.event",
        "type": event.kind,
        "tenant": event.tenant,
        "time": round(event.time_s, 3),
        "counts": event.counts,
    }
