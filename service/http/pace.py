"""How often a tenant may look at what takes the engine's time: one at a time, and with rests.

Knows tenants and seconds; nothing of what is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

REST = 9.0
"""A look is followed by a rest so many times as long, so that looks take a tenth of the time."""
MOST_REST_S = 5.0


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    free_s: float = 0.0


class Pace:
    """Keeps one tenant's looks from holding up everybody's steps. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns: defaultdict[str, _Turn] = defaultdict(_Turn)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until ``tenant`` may look, and let it."""
        turn = self._turns[tenant]
        async with turn.lock:
            await asyncio.sleep(max(0.0, turn.free_s - self._clock()))
            began_s = self._clock()
            try:
                yield
            finally:
                took_s = self._clock() - began_s
                turn.free_s = began_s + took_s + min(REST * took_s, MOST_REST_S)


PACE = web.AppKey("PACE", Pace)
