"""What each tenant may still ask, and the 429 that says which limit was met and until when.

Knows numbers, a clock and the requests in flight; nothing of keys or bodies. Whatever it answers
follows from the tenant's own requests: no number here depends on what others do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from radixkv.errors import InvalidRequest, Overloaded
from radixkv.service.tenants import Tenant

if TYPE_CHECKING:
    from radixkv.service.engine.stream import Stream

_MINUTE_S = 60.0
_NOTHING = 1e-6
"""Of a request or a token: what sums of times may be wrong by."""
_SOON_S = 1.0
"""When to come back if that depends on when others of one's own requests end."""


class LimitDetail(TypedDict):
    """The limit that was met: its name in the tenants file, its value, seconds to wait."""

    name: str
    value: int
    retry_after_s: float


class LimitReached(Overloaded):
    """One of the tenant's own limits is used up."""

    code = "rate_limit_exceeded"

    def __init__(self, name: str, value: int, wait_s: float, what: str) -> None:
        wait_s = max(wait_s, 0.001)
        super().__init__(
            f"{what} (limit {name}: {value}). Please try again in {_span(wait_s)}.",
            retry_after_s=math.ceil(wait_s),
        )
        self.limit: LimitDetail = {
            "name": name,
            "value": value,
            "retry_after_s": math.ceil(wait_s * 1000) / 1000,  # not a moment too early
        }


@dataclass(frozen=True, slots=True)
class Room:
    """What the server has for one tenant, in choices."""

    max_running: int
    """May run at once, whoever's they are."""
    fair_choices: int
    """The tenant's share, by weight, of what may run or wait."""


class Bucket:
    """Fills at a steady rate up to one minute's worth. May be overdrawn: then it must fill first.

    What costs more than a whole minute's worth is let through when the bucket is full, and paid
    for afterwards; so nothing is refused for ever, and the average holds.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def resize(self, per_minute: int, now: float) -> None:
        """Take another limit; what was used stays used."""
        self._fill(now)
        self._level += per_minute - self.per_minute
        self.per_minute = per_minute

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until ``cost`` may be taken; 0 if it may be now."""
        self._fill(now)
        short = min(cost, self.per_minute) - self._level
        return short * _MINUTE_S / self.per_minute if short > _NOTHING else 0.0

    def take(self, cost: float, now: float) -> None:
        """Take ``cost``, or give back if it is negative."""
        self._fill(now)
        self._level = min(self._level - cost, float(self.per_minute))

    def left(self, now: float) -> int:
        """What may be taken now."""
        self._fill(now)
        return max(0, int(self._level))

    def full_in_s(self, now: float) -> float:
        """Seconds until it is full."""
        self._fill(now)
        return (self.per_minute - self._level) * _MINUTE_S / self.per_minute

    def _fill(self, now: float) -> None:
        grown = (now - self._at) * self.per_minute / _MINUTE_S
        self._level = min(self._level + grown, float(self.per_minute))
        self._at = now


class TenantLimits:
    """One tenant's use of its limits, while the server runs. Used on the event loop only.

    Prompt tokens are charged when a request is submitted, those of its answer as they are
    generated: what runs is looked at whenever the tenant asks for more.
    """

    def __init__(
        self, tenant: Tenant, room: Room, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tenant = tenant
        self._clock = clock
        self._room = room
        self._requests = _bucket(None, tenant.requests_per_minute, clock())
        self._tokens = _bucket(None, tenant.tokens_per_minute, clock())
        self._charged: dict[Stream, int] = {}
        """Requests in flight, and the tokens of each answer that were charged."""

    def change(self, tenant: Tenant, room: Room) -> None:
        """Take the limits of a new reading of the file; what was used stays used."""
        now = self._clock()
        self._requests = _bucket(self._requests, tenant.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, tenant.tokens_per_minute, now)
        self.tenant, self._room = tenant, room

    @property
    def in_flight(self) -> int:
        """Choices of this tenant that run or wait."""
        return sum(stream.num_choices for stream in self._charged)

    def count_request(self) -> None:
        """Charge one call; raises LimitReached."""
        if self._requests is None:
            return
        now = self._clock()
        wait_s = self._requests.wait_s(1, now)
        if wait_s > 0:
            raise LimitReached(
                "requests_per_minute", self._requests.per_minute, wait_s, "Too many requests"
            )
        self._requests.take(1, now)

    def admit(self, prompt_tokens: int, choices: int) -> None:
        """Charge a prompt, or several, of so many tokens; raises LimitReached, or InvalidRequest
        for more choices than may ever run at once, and then nothing is charged."""
        self._check_choices(choices)
        if self._tokens is None:
            return
        now = self._clock()
        self._settle(now)
        wait_s = self._tokens.wait_s(prompt_tokens, now)
        if wait_s > 0:
            raise LimitReached(
                "tokens_per_minute",
                self._tokens.per_minute,
                wait_s,
                f"Too many tokens: {prompt_tokens} asked for",
            )
        self._tokens.take(prompt_tokens, now)

    def give_back(self, prompt_tokens: int) -> None:
        """Undo the charge of a prompt that was not run after all."""
        if self._tokens is not None:
            self._tokens.take(-prompt_tokens, self._clock())

    def enter(self, stream: Stream) -> None:
        """A request is in flight."""
        self._charged[stream] = 0

    def leave(self, stream: Stream) -> None:
        """It is not any more; what it generated is charged."""
        charged = self._charged.pop(stream, None)
        if charged is not None and self._tokens is not None:
            self._tokens.take(stream.usage.completion_tokens - charged, self._clock())

    def headers(self) -> dict[str, str]:
        """Return what is left, in OpenAI's headers."""
        now, found = self._clock(), {}
        if self._tokens is not None:
            self._settle(now)
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.left(now))
                found[f"x-ratelimit-reset-{name}"] = _span(bucket.full_in_s(now))
        return found

    def _check_choices(self, choices: int) -> None:
        """Refuse what the tenant's own queue has no room for.

        Without a ``max_queued`` a tenant may fill its share, by weight, of all that may run or
        wait here, and no more: so it is never refused for what others have in flight.
        """
        at_once, queued, in_flight = self.tenant.max_concurrent, self.tenant.max_queued, 0
        if at_once is not None and choices > at_once:
            raise InvalidRequest(
                f"this asks for {choices} choices at once; your max_concurrent is {at_once}",
                param="n",
            )
        if self._charged:
            in_flight = self.in_flight
        name, value, most = "max_queued", queued, self._room.fair_choices
        if queued is not None:
            most = queued + (self._room.max_running if at_once is None else at_once)
        if queued == 0 and at_once is not None:
            name, value = "max_concurrent", at_once
        if in_flight and in_flight + choices > most:
            raise LimitReached(
                name,
                most if value is None else value,
                _SOON_S,
                f"{in_flight} of your choices run or wait, and {most} may",
            )

    def _settle(self, now: float) -> None:
        """Charge what was generated since the last look."""
        assert self._tokens is not None
        for stream, charged in self._charged.items():
            generated = stream.usage.completion_tokens
            if generated != charged:
                self._tokens.take(generated - charged, now)
                self._charged[stream] = generated


def _bucket(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if old is None:
        return Bucket(per_minute, now)
    old.resize(per_minute, now)
    return old


def _span(seconds: float) -> str:
    """Write a time as OpenAI does: ``20ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s"
