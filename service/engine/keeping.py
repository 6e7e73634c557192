"""Pins what requests ask to keep, when their prompt's KV is there, and renews what they use.

Knows requests, owners and the cache's pins; nothing of how anybody asked. Used by the engine thread
only. An owner is a tenant: what one of them has pinned never changes what another one is granted,
for each has a share of its own of what may be pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.cache import PrefixCache
from radixkv.service.engine.keep import Keep, Kept

if TYPE_CHECKING:
    from radixkv.pins import Pin
    from radixkv.service.engine.request import Sequence as Choice


@dataclass(frozen=True, slots=True)
class PinBudget:
    """What one owner may pin and has pinned; a block under two of its pins counts once."""

    blocks: int
    used_blocks: int


class Keeper:
    """The pins of one engine's cache."""

    def __init__(
        self,
        cache: PrefixCache,
        pinnable_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pins = getattr(cache, "pins", None)
        self._pinnable = pinnable_blocks
        self._clock = clock
        self._shares: dict[str, float] | None = None

    def set_shares(self, weights: Mapping[str, float]) -> None:
        """Divide what may be pinned between these owners; others may pin nothing from now on.

        What is pinned already stays so to its end. Before the first call each owner may pin all.
        """
        total = sum(weights.values())
        self._shares = {owner: weight / total for owner, weight in weights.items()} if total else {}

    def budget(self, owner: str) -> PinBudget:
        """Return what ``owner`` may pin and has pinned."""
        self.expire()
        return PinBudget(self._blocks_of(owner), self._pins.used_blocks(owner))

    def now(self) -> float:
        """Return the time by which pins expire, in seconds."""
        return self._clock()

    def expire(self) -> None:
        """Let go what was not used for its time. O(what expires)."""
        self._pins.expire(self._clock())

    def pins(self, owner: str | None) -> list[Pin]:
        """Return the pins of ``owner``, or everybody's, the oldest first."""
        self.expire()
        return self._pins.list(owner)

    def unpin(self, owner: str | None, *, pin_id: str | None, name: str | None) -> list[str]:
        """Let pins go, by id or name, of ``owner`` only unless that is None; return their ids."""
        gone = [
            pin.id
            for pin in self.pins(owner)
            if (pin_id is not None and pin.id == pin_id) or (name is not None and pin.name == name)
        ]
        for each in gone:
            self._pins.unpin(each)
        return gone

    def prompt_computed(self, keeps: Sequence[Keep], first: Choice) -> None:
        """Renew the pins that this prompt begins with, and pin what it asks to keep.

        ``first`` holds the prompt's KV; nothing was generated yet. What was granted is noted in the
        request's stream.
        """
        request = first.request
        if self._pins is None:
            request.stream.kept = tuple(Kept(keep, 0, None) for keep in keeps)
            return
        owner, prompt = request.origin.tenant, request.prompt_bytes
        self.expire()
        mine = self._pins.list(owner)
        if not keeps and not mine:
            return
        for pin in mine:
            if pin.identity == request.identity and prompt.startswith(pin.tokens):
                self._pins.refresh(pin.id)
        if keeps and request.may_publish:
            first.publish(tail=True)
        kept = [self._keep(first, keep) for keep in sorted(keeps, key=lambda k: k.num_tokens)]
        request.stream.kept = tuple(kept)

    def _keep(self, seq: Choice, keep: Keep) -> Kept:
        request = seq.request
        owner = request.origin.tenant
        blocks = self._blocks_of(owner)
        if not request.may_publish or not blocks or not keep.num_tokens:
            return Kept(keep, 0, None)
        if keep.name is not None:  # what had this name before may stand in the way of its follower
            self.unpin(owner, pin_id=None, name=keep.name)
        self._pins.set_budget(owner, blocks)
        pin = self._pins.pin(
            request.identity,
            request.prompt_bytes[: 4 * keep.num_tokens],
            owner=owner,
            ttl_s=keep.ttl_s,
            name=keep.name,
        )
        if not pin.granted_tokens:
            return Kept(keep, 0, None)
        if keep.name is None:
            self._let_go_shorter(pin)
        return Kept(keep, pin.granted_tokens, pin.id)

    def _let_go_shorter(self, pin: Pin) -> None:
        """Let go what ``pin`` holds too and for longer: as a chat grows, so does its one pin."""
        for other in self._pins.list(pin.owner):
            if (
                other.id != pin.id
                and other.name is None
                and _lives_longer(pin, other)
                and other.identity == pin.identity
                and pin.tokens.startswith(other.tokens)
            ):
                self._pins.unpin(other.id)

    def _blocks_of(self, owner: str) -> int:
        if self._shares is None:
            return self._pinnable
        return int(self._pinnable * self._shares.get(owner, 0.0))


def _lives_longer(pin: Pin, other: Pin) -> bool:
    if pin.ttl_s is None:
        return True
    return other.ttl_s is not None and other.ttl_s <= pin.ttl_s
