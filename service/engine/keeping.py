"""Pins what requests ask to keep, once their prompt's KV is there, within their owner's budget.

Knows requests, owners and the cache's pins; nothing of how anybody asked. Used by the engine thread
only. An owner is a tenant. Each has a share of its own of what may be pinned, so what one of them
has pinned never changes, nor shows in, what another one is granted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity
from radixkv.pin import Pin
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.keep import Keep, Kept
from radixkv.service.engine.request import Sequence as Choice
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PinBudget:
    """What one owner may pin and has pinned; a block under two of its pins counts once."""

    blocks: int
    used_blocks: int


class Keeper:
    """The pins of one engine's cache."""

    def __init__(self, cache: PrefixCache, capacity: Capacity) -> None:
        self._pins = cache.pins
        self._capacity = capacity
        self._budgets: dict[str, int] | None = None

    def set_shares(self, weights: Mapping[str, float], floors: Mapping[str, int]) -> None:
        """Divide what may be pinned between these owners; others may pin nothing from now on, and
        what they have pinned is let go: nobody is left who could.

        ``floors`` are the blocks that each keeps against all others: what is left beside them must
        hold the longest request, pins or not. What these have pinned stays so to its end. Before
        the first call there is one owner, who may pin all.
        """
        capacity, total = self._capacity, sum(weights.values())
        others = sum(floors.values()) - min(floors.values(), default=0)
        blocks = max(0, min(capacity.pinnable_blocks, capacity.spare_blocks - others))
        self._budgets = {
            owner: int(blocks * weight / total) for owner, weight in weights.items() if total
        }
        for owner in {pin.owner for pin in self._pins.list()} - set(weights):
            self._pins.unpin_owner(owner)

    @property
    def promised_blocks(self) -> int:
        """Blocks that all owners together may pin."""
        if self._budgets is None:
            return self._capacity.pinnable_blocks
        return sum(self._budgets.values())

    def budget(self, owner: str) -> PinBudget:
        """Return what ``owner`` may pin and has pinned."""
        self._pins.expire()
        return PinBudget(self._blocks_of(owner), self._pins.used_blocks(owner))

    def of(self, owner: str | None) -> list[Pin]:
        """Return the pins of ``owner``, or everybody's, the oldest first."""
        self._pins.expire()
        return self._pins.list(owner)

    def now(self) -> float:
        """Return the time by which pins are made and expire, in seconds."""
        return self._pins.clock()

    def unpin(self, owner: str | None, *, pin_id: str | None, name: str | None) -> list[str]:
        """Let pins go, by id or name, of ``owner`` only unless that is None; return their ids."""
        gone = [
            pin.id
            for pin in self._pins.list(owner)
            if (pin_id is not None and pin.id == pin_id) or (name is not None and pin.name == name)
        ]
        for each in gone:
            self._pins.unpin(each)
        return gone

    def prompt_computed(self, keeps: Sequence[Keep], first: Choice) -> None:
        """Pin what a request asked to keep, and note in its stream what was granted.

        ``first`` holds the prompt's KV; nothing was generated yet.
        """
        request = first.request
        if request.may_publish:
            first.publish(tail=True)
        # The shortest first: where the budget is short, it lives longest.
        kept = [self._keep(first, keep) for keep in sorted(keeps, key=lambda k: k.num_tokens)]
        request.stream.kept = tuple(kept)

    def hold(
        self,
        identity: CacheIdentity,
        tokens: bytes,
        *,
        owner: str,
        ttl_s: float | None,
        name: str,
    ) -> Pin | None:
        """Pin what is resident of ``tokens`` in the owner's budget; None if he has none at all.

        Pins of the same name stay: it is for whoever knows his pins by their ids.
        """
        blocks = self._blocks_of(owner)
        if not blocks or not tokens:
            return None
        self._pins.set_budget(owner, blocks)
        return self._pins.pin(identity, tokens, owner=owner, ttl_s=ttl_s, name=name)

    def _keep(self, seq: Choice, keep: Keep) -> Kept:
        request = seq.request
        owner = request.origin.tenant
        blocks = self._blocks_of(owner)
        if not request.may_publish or not blocks or not keep.num_tokens:
            return Kept(keep, 0, None)
        tokens = request.prompt_bytes[: TOKEN_BYTES * keep.num_tokens]
        if keep.name is not None:
            self._let_go_namesakes(owner, keep.name, tokens)
        self._pins.set_budget(owner, blocks)

        def pin() -> Pin:
            return self._pins.pin(
                request.identity, tokens, owner=owner, ttl_s=keep.ttl_s, name=keep.name
            )

        pinned = pin()
        if keep.name is None:
            wanted = tokens if pinned.short == "budget" else _granted(pinned)
            if self._let_go_shorter(pinned, wanted) and pinned.short == "budget":
                pinned = pin()
        if not pinned.granted_tokens:
            return Kept(keep, 0, None)
        return Kept(keep, pinned.granted_tokens, pinned.id)

    def _let_go_namesakes(self, owner: str, name: str, tokens: bytes) -> None:
        """What had this name and was something else makes room for what has it now."""
        for other in self._pins.list(owner):
            if other.name == name and other.tokens != tokens:
                self._pins.unpin(other.id)

    def _let_go_shorter(self, pin: Pin, tokens: bytes) -> bool:
        """Let go the nameless pins that ``tokens`` begin with and that ``pin`` outlives.

        So a chat that grows has one pin that grows, not one for each turn. Tells if there was any.
        """
        shorter = [
            other.id
            for other in self._pins.list(pin.owner)
            if other.id != pin.id
            and other.name is None
            and other.identity == pin.identity
            and _outlives(pin, other)
            and tokens.startswith(_granted(other))
        ]
        for each in shorter:
            self._pins.unpin(each)
        return bool(shorter)

    def _blocks_of(self, owner: str) -> int:
        if self._budgets is None:
            return self._capacity.pinnable_blocks
        return self._budgets.get(owner, 0)


def _granted(pin: Pin) -> bytes:
    return pin.tokens[: TOKEN_BYTES * pin.granted_tokens]


def _outlives(pin: Pin, other: Pin) -> bool:
    if pin.ttl_s is None:
        return True
    return other.ttl_s is not None and other.ttl_s <= pin.ttl_s
