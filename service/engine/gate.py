"""Who is let in: how many choices may be in flight, in all and of one tenant.

Knows tenants and counts, and that the engine is about to end; nothing of what was asked. Used from
any thread; whoever is refused is told at once, so nobody waits in a queue without a bound.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from radixkv.errors import EngineDead, Overloaded
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.shares import DEFAULT_SHARE, TenantShare


class Gate:
    """Counts choices of requests that are not finished. ``refused`` is told of each Overloaded."""

    def __init__(
        self, *, max_num_seqs: int, max_queue: int, refused: Callable[[Origin], None]
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._limit = max_num_seqs + max_queue
        self._refused = refused
        self._changed = threading.Condition()
        self._in_flight = 0
        self._in_flight_of: Counter[str] = Counter()
        self._shares: dict[str, TenantShare] = {}
        self._closed = False

    def set_share(self, tenant: str, share: TenantShare) -> None:
        """Hold ``tenant`` to other limits from now on."""
        with self._changed:
            self._shares[tenant] = share

    def enter(self, num_choices: int, origin: Origin) -> None:
        """Let a request in; raises Overloaded, or EngineDead if nobody is let in any more.

        One that is larger than a limit comes in alone.
        """
        with self._changed:
            if self._closed:
                raise EngineDead("the engine is shutting down")
            if self._in_flight and self._in_flight + num_choices > self._limit:
                self._refused(origin)
                raise Overloaded(
                    f"{self._in_flight} choices run or wait, and {self._limit} may; "
                    "try again later",
                    retry_after_s=1,
                )
            share = self._shares.get(origin.tenant, DEFAULT_SHARE)
            mine = self._in_flight_of[origin.tenant]
            if mine and share.max_waiting is not None:
                running = share.max_running or self._max_num_seqs
                if mine + num_choices > running + share.max_waiting:
                    self._refused(origin)
                    raise Overloaded(
                        f"your limits are max_running {running} and max_waiting "
                        f"{share.max_waiting}: {mine} choices run or wait; try again later",
                        retry_after_s=1,
                    )
            self._in_flight += num_choices
            self._in_flight_of[origin.tenant] += num_choices

    def leave(self, origin: Origin, num_choices: int) -> None:
        """A request of ``num_choices`` is over."""
        with self._changed:
            self._in_flight -= num_choices
            self._in_flight_of[origin.tenant] -= num_choices
            if not self._in_flight_of[origin.tenant]:
                del self._in_flight_of[origin.tenant]
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; idempotent."""
        with self._changed:
            self._closed = True

    def wait_until_empty(self, timeout_s: float, *, unless: Callable[[], bool]) -> bool:
        """Wait for all to leave; True if they did in time, and before ``unless`` became true."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._in_flight and not unless():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
            return self._in_flight == 0
