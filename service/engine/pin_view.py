"""The pins of an engine as seen from outside the engine thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.service.engine.keeping import Keeper, PinBudget

if TYPE_CHECKING:
    from radixkv.pin import Pin
    from radixkv.service.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as of one moment; times are Unix times in seconds."""

    id: str
    owner: str
    name: str | None
    tokens: int
    """Held, from the beginning of the prompt."""
    blocks: int
    ttl_s: float | None
    created_at: float
    expires_at: float | None
    """If nobody uses it; None if it stays until it is unpinned."""


class PinView:
    """List the pins, or let some go. What returns something waits for the end of a step."""

    def __init__(self, core: EngineCore, keeper: Keeper) -> None:
        self._core = core
        self._keeper = keeper

    def of(self, owner: str | None = None) -> list[PinInfo]:
        """Return the pins of ``owner``, or everybody's."""

        def look() -> list[PinInfo]:
            offset_s = time.time() - self._keeper.now()
            return [_info(pin, offset_s) for pin in self._keeper.of(owner)]

        return self._core.call(look).result()

    def unpin(
        self, owner: str | None = None, *, pin_id: str | None = None, name: str | None = None
    ) -> list[str]:
        """Let pins go by id or by name, of ``owner`` only unless that is None; return their ids."""
        return self._core.call(lambda: self._keeper.unpin(owner, pin_id=pin_id, name=name)).result()

    def budget(self, owner: str) -> PinBudget:
        """Return what ``owner`` may pin and has pinned."""
        return self._core.call(lambda: self._keeper.budget(owner)).result()

    def set_shares(self, weights: Mapping[str, float], floors: Mapping[str, int]) -> None:
        """Divide what may be pinned between these owners (``Keeper.set_shares``); does not wait."""
        self._core.call(lambda: self._keeper.set_shares(weights, floors))


def _info(pin: Pin, offset_s: float) -> PinInfo:
    return PinInfo(
        id=pin.id,
        owner=pin.owner,
        name=pin.name,
        tokens=pin.granted_tokens,
        blocks=pin.num_blocks,
        ttl_s=pin.ttl_s,
        created_at=pin.created_at + offset_s,
        expires_at=None if pin.expires_at is None else pin.expires_at + offset_s,
    )
