"""What was asked and found in the last minutes and hours, by tenant, identity and label.

Knows counts and times; nothing of requests, blocks or text. The engine thread writes, once per
admission, chunk of a prompt, preemption and finish, each in O(1); anyone may read, without waiting
for a step. Memory is bounded: so many tenants, so many keys of each, so many slots of time; what is
too many is counted under ``OTHER``, so sums stay right.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from radixkv.identity.identity import CacheIdentity

COUNTS: Final = (
    "requests",
    "queried_tokens",
    "hit_tokens",
    "found_later_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "restored_tokens",
    "generated_tokens",
    "preemptions",
)
"""What is counted, each under every key. ``queried_tokens`` is the denominator of the hit rate."""

BLOCK_COUNTS: Final = ("evicted_suffered_blocks", "evicted_caused_blocks")
"""What is known by tenant only, as are REASONS."""
REASONS: Final = (
    "first_seen",
    "diverged",
    "evicted",
    "expired",
    "adapter",
    "template",
    "tokenizer",
    "execution",
    "model",
    "namespace",
    "in_flight",
    "below_block",
    "last_token",
    "no_room",
    "disabled",
)
"""Why tokens were queried and not hit; counted by tenant."""
_ALL: Final = (*COUNTS, *BLOCK_COUNTS, *REASONS)

SECOND_SLOTS: Final = 300
MINUTE_SLOTS: Final = 360
MAX_WINDOW_S: Final = 60 * MINUTE_SLOTS
MAX_TENANTS: Final = 256
MAX_KEYS: Final = 64

By = Literal["tenant", "identity", "prompt_cache_key"]
K = TypeVar("K")


class Other:
    """Stands for all the keys for which there was no room."""

    def __repr__(self) -> str:
        return "OTHER"


OTHER: Final = Other()


class Ring:
    """Counts by slot of time. A slot is made when something is counted in it, never for nothing."""

    __slots__ = ("_limit", "_slots", "_width_s")

    def __init__(self, width_s: int, limit: int) -> None:
        self._width_s = width_s
        self._limit = limit
        self._slots: deque[tuple[int, list[int]]] = deque()

    def at(self, now_s: float) -> list[int]:
        """Return the counts of the slot that ``now_s`` is in, to be added to."""
        tick, slots = int(now_s // self._width_s), self._slots
        if slots and slots[-1][0] >= tick:  # the clock never runs back
            return slots[-1][1]
        while slots and slots[0][0] <= tick - self._limit:
            slots.popleft()
        counts = [0] * len(_ALL)
        slots.append((tick, counts))
        return counts

    def total(self, now_s: float, window_s: float) -> list[int]:
        """Return the sum over the slots that begin at or after ``start_s(now_s, window_s)``."""
        first = self._first(now_s, window_s)
        total = [0] * len(_ALL)
        for tick, counts in reversed(self._slots):
            if tick < first:
                break
            for i, n in enumerate(counts):
                total[i] += n
        return total

    def start_s(self, now_s: float, window_s: float) -> float:
        """Return when the window's first slot began: slots are taken whole."""
        return self._first(now_s, window_s) * self._width_s

    def _first(self, now_s: float, window_s: float) -> int:
        num_slots = max(1, -int(-window_s // self._width_s))
        return int(now_s // self._width_s) - min(num_slots, self._limit) + 1

    @property
    def last_s(self) -> float:
        """When the last slot began; 0 if there is none."""
        return self._slots[-1][0] * self._width_s if self._slots else 0.0


class Series:
    """The counts of one key: by second for the last minutes, by minute for the last hours."""

    __slots__ = ("minutes", "seconds")

    def __init__(self) -> None:
        self.seconds = Ring(1, SECOND_SLOTS)
        self.minutes = Ring(60, MINUTE_SLOTS)

    def ring(self, window_s: float) -> Ring:
        """Return the finest ring that reaches back so far."""
        return self.seconds if window_s <= SECOND_SLOTS else self.minutes


class _Bounded(Generic[K]):
    """Series by key, at most ``limit`` of them and one more for the rest.

    A key that was silent for as long as we remember makes room for a new one.
    """

    __slots__ = ("_limit", "_rest", "_series", "_swept_s")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._series: dict[K, Series] = {}
        self._rest: Series | None = None
        self._swept_s = 0.0

    def of(self, key: K, now_s: float) -> Series:
        """Return the series to count ``key`` in."""
        series = self._series.get(key)
        if series is not None:
            return series
        if len(self._series) >= self._limit and now_s - self._swept_s >= 60:
            self._swept_s = now_s
            for old in [k for k, s in self._series.items() if _silent(s, now_s)]:
                del self._series[old]
        if len(self._series) < self._limit:
            series = self._series[key] = Series()
            return series
        if self._rest is None:
            self._rest = Series()
        return self._rest

    def __iter__(self) -> Iterator[tuple[K | Other, Series]]:
        yield from self._series.items()
        if self._rest is not None:
            yield OTHER, self._rest


def _silent(series: Series, now_s: float) -> bool:
    return series.minutes.last_s < now_s - MAX_WINDOW_S - 60


class _Tenant:
    """One tenant's series. Its labels are its own affair: they take nobody else's room."""

    __slots__ = ("by_cache_key", "by_identity", "total")

    def __init__(self) -> None:
        self.total = Series()
        self.by_identity: _Bounded[CacheIdentity] = _Bounded(MAX_KEYS)
        self.by_cache_key: _Bounded[str | None] = _Bounded(MAX_KEYS)


@dataclass(frozen=True, slots=True)
class Row:
    """The counts of one key in the window; ``key`` is None for requests without a label."""

    tenant: str | Other
    key: CacheIdentity | str | Other | None
    counts: dict[str, int]
    """By the names of COUNTS, and of BLOCK_COUNTS and REASONS where the row is a tenant's."""

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens by queried tokens; None if nothing was queried (METRICS-6)."""
        queried = self.counts["queried_tokens"]
        return self.counts["hit_tokens"] / queried if queried else None


@dataclass(frozen=True, slots=True)
class Window:
    """What was counted from ``start_s`` to ``end_s`` (seconds of the history's own clock)."""

    start_s: float
    end_s: float
    slot_s: int
    rows: tuple[Row, ...]


class History:
    """Counts by tenant, identity and label over time. One lock, held for microseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin again, as if nothing had been asked yet."""
        with self._lock:
            self._began_s = self._clock()
            self._tenants: dict[str, _Tenant] = {}
            self._rest: _Tenant | None = None

    def add(
        self, tenant: str, identity: CacheIdentity, cache_key: str | None, **counts: int
    ) -> None:
        """Count ``counts`` (names of COUNTS) now, for a tenant, an identity and a label. O(1)."""
        added = [(_INDEX[name], n) for name, n in counts.items() if n]
        with self._lock:
            now_s = self._clock()
            mine = self._of(tenant)
            for series in (
                mine.total,
                mine.by_identity.of(identity, now_s),
                mine.by_cache_key.of(cache_key, now_s),
            ):
                for slot in (series.seconds.at(now_s), series.minutes.at(now_s)):
                    for i, n in added:
                        slot[i] += n

    def add_blocks(self, tenant: str, *, suffered: int, caused: int) -> None:
        """Count blocks that ``tenant`` gave up, and those that it made anybody give up. O(1)."""
        with self._lock:
            now_s, total = self._clock(), self._of(tenant).total
            for slot in (total.seconds.at(now_s), total.minutes.at(now_s)):
                slot[_INDEX["evicted_suffered_blocks"]] += suffered
                slot[_INDEX["evicted_caused_blocks"]] += caused

    def add_missed(self, tenant: str, reasons: Mapping[str, int]) -> None:
        """Count tokens of a prompt that were not found, by reason (of REASONS). O(reasons)."""
        added = [(_INDEX[reason], n) for reason, n in reasons.items()]
        with self._lock:
            now_s, total = self._clock(), self._of(tenant).total
            for slot in (total.seconds.at(now_s), total.minutes.at(now_s)):
                for i, n in added:
                    slot[i] += n

    def read(
        self, window_s: float, by: By = "tenant", tenants: Collection[str] | None = None
    ) -> Window:
        """Return what was counted in the last ``window_s`` seconds.

        Of ``tenants`` alone, or of all if None. Slots of time are taken whole, the running one
        included, so the window is up to one slot shorter than asked; and no longer than we run.
        Raises ValueError for a window that is not between 1 and MAX_WINDOW_S seconds.
        """
        if not 1 <= window_s <= MAX_WINDOW_S:
            raise ValueError(f"window is {window_s:g} s; wanted 1 to {MAX_WINDOW_S}")
        with self._lock:
            now_s, names = self._clock(), _ALL if by == "tenant" else COUNTS
            rows = [
                Row(tenant, key, dict(zip(names, total, strict=False)))
                for tenant, mine in self._shown(tenants)
                for key, series in _series_of(mine, by)
                if any(total := series.ring(window_s).total(now_s, window_s)) or by == "tenant"
            ]
            start_s = Series().ring(window_s).start_s(now_s, window_s)
        return Window(
            start_s=max(start_s, self._began_s),
            end_s=now_s,
            slot_s=1 if window_s <= SECOND_SLOTS else 60,
            rows=tuple(rows),
        )

    def _of(self, tenant: str) -> _Tenant:
        mine = self._tenants.get(tenant)
        if mine is not None:
            return mine
        if len(self._tenants) < MAX_TENANTS:
            mine = self._tenants[tenant] = _Tenant()
            return mine
        if self._rest is None:
            self._rest = _Tenant()
        return self._rest

    def _shown(self, tenants: Collection[str] | None) -> Iterator[tuple[str | Other, _Tenant]]:
        for name, mine in self._tenants.items():
            if tenants is None or name in tenants:
                yield name, mine
        if tenants is None and self._rest is not None:
            yield OTHER, self._rest


_INDEX = {name: i for i, name in enumerate(_ALL)}


def _series_of(
    mine: _Tenant, by: By
) -> Iterator[tuple[CacheIdentity | str | Other | None, Series]]:
    if by == "tenant":
        yield None, mine.total
    elif by == "identity":
        yield from mine.by_identity
    else:
        yield from mine.by_cache_key
