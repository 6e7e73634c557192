"""What sessions hold resident: a pin for each place that a session stands at, shared by its forks.

Knows pins, their owners and when they are let go; nothing of what was said. A pin is made on the
engine thread in the moment an answer ends, before anything of it can be evicted, and let go with
the last session that stands there. Nothing here waits but ``look``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.pin import Pin
    from radixkv.service.engine.core import EngineCore
    from radixkv.service.engine.keeping import Keeper
    from radixkv.service.engine.request import Sequence as Choice

Short: TypeAlias = Literal["budget", "not_resident", "gone"]


@dataclass(frozen=True, slots=True)
class SessionLease:
    """What a session holds resident as of one moment."""

    tokens: int
    """Held, from the first of the session's on."""
    wanted_tokens: int
    """All that have KV: the last token of an answer that was cut short by ``max_tokens`` has none
    until something follows it."""
    blocks: int
    """Held; forks hold the same ones, and in the budget they count once."""
    short: Short | None
    """Why less is held than was wanted: no room in the budget; it was evicted before it could be
    held; or its time ran out, or somebody unpinned it."""
    ttl_s: float | None
    expires_in_s: float | None
    """If nobody uses it; None if it stays until the session is closed."""


class Hold:
    """A pin that some sessions share, one to begin with. What it holds the engine thread knows."""

    __slots__ = (
        "budget_blocks",
        "identity",
        "name",
        "owner",
        "pin_id",
        "short",
        "tokens",
        "ttl_s",
        "users",
    )

    def __init__(self, owner: str, ttl_s: float | None, budget_blocks: int | None) -> None:
        self.name = f"session-{secrets.token_hex(8)}"
        self.owner = owner
        self.ttl_s = ttl_s
        self.budget_blocks = budget_blocks
        self.users = 1
        self.identity: CacheIdentity | None = None
        """Under which the KV was computed; None before any was."""
        self.tokens = b""
        """What is to be held once it has KV, as token bytes."""
        self.pin_id: str | None = None
        self.short: Short | None = None

    def another(self) -> Hold:
        """Return a hold of nothing yet, for the same owner and as long."""
        return Hold(self.owner, self.ttl_s, self.budget_blocks)


class Holds:
    """The holds of one engine's sessions. May be used from any thread."""

    def __init__(self, core: EngineCore, keeper: Keeper) -> None:
        self.lock = threading.RLock()  # of the counts of users; held for an instant
        self._core = core
        self._keeper = keeper

    def share(self, hold: Hold) -> Hold:
        """Count one more user."""
        with self.lock:
            hold.users += 1
        return hold

    def give(self, hold: Hold) -> None:
        """Count one user less; with the last one the pin is let go."""
        with self.lock:
            hold.users -= 1
            last = hold.users == 0
        if last:
            self._core.call(lambda: self._let_go(hold))  # whose engine has ended holds nothing

    def at_end(self, hold: Hold, before: Hold) -> Callable[[Choice], None]:
        """Return what the engine is to call when the answer to hold has ended.

        What was sent from is held again by ``before``, if that had lost it and somebody still
        stands there: it was computed for the answer.
        """

        def ended(choice: Choice) -> None:
            request = choice.request
            if not request.may_publish:
                return
            if before.users:
                before.identity = request.identity
                self._hold(before, before.tokens)
            if not hold.users:
                return
            listed = request.stream._choices[choice.index].token_ids
            # What ended the answer is not listed; the token that was drawn last was not computed.
            size = min(len(request.prompt_ids) + len(listed), len(choice.ids) - 1)
            hold.identity = request.identity
            self._hold(hold, bytes(choice.tokens[: TOKEN_BYTES * size]))

        return ended

    def settle(self, hold: Hold, num_tokens: int) -> None:
        """Hold no more than the first ``num_tokens``, and what there is room for by now."""

        def settle() -> None:
            if hold.users and hold.identity is not None:
                self._hold(hold, hold.tokens[: TOKEN_BYTES * num_tokens])

        self._core.call(settle)

    def moved(self, hold: Hold, tokens: bytes) -> Hold:
        """Return a hold of ``tokens``, of which ``hold`` may have a part, and give that back."""
        other = hold.another()

        def move() -> None:
            other.identity = hold.identity
            if other.users and other.identity is not None:
                self._hold(other, tokens)

        self._core.call(move)
        self.give(hold)
        return other

    def look(self, hold: Hold) -> SessionLease:
        """Say what is held now; waits for the end of a step. Raises EngineDead."""
        return self._core.call(lambda: self._look(hold)).result()

    # ---- on the engine thread -------------------------------------------------------------------

    def _hold(self, hold: Hold, tokens: bytes) -> None:
        """Hold as much of ``tokens`` as both budgets allow, and then nothing else."""
        before, hold.tokens = hold.pin_id, tokens
        size = len(tokens)
        if hold.budget_blocks is not None:
            size = min(size, hold.budget_blocks * self._core.cache.block_size * TOKEN_BYTES)
        identity = hold.identity
        assert identity is not None

        def pin() -> Pin | None:
            return self._keeper.hold(
                identity, tokens[:size], owner=hold.owner, ttl_s=hold.ttl_s, name=hold.name
            )

        made = pin()
        if before is not None and (made is None or made.id != before):
            self._core.cache.pins.unpin(before)
            made = pin() if made is not None and made.short else made  # into the room that it had
        hold.short = made.short if made is not None else "budget" if tokens else None
        hold.pin_id = made.id if made is not None and made.granted_tokens else None

    def _let_go(self, hold: Hold) -> None:
        if hold.pin_id is not None:
            self._core.cache.pins.unpin(hold.pin_id)
            hold.pin_id = None

    def _look(self, hold: Hold) -> SessionLease:
        pins = [pin for pin in self._keeper.of(hold.owner) if pin.id == hold.pin_id]
        wanted = 0 if hold.identity is None else len(hold.tokens) // TOKEN_BYTES
        if not pins:
            short = hold.short if hold.pin_id is None else "gone"
            return SessionLease(0, wanted, 0, short, hold.ttl_s, None)
        (pin,) = pins
        left = None if pin.expires_at is None else max(0.0, pin.expires_at - self._keeper.now())
        return SessionLease(
            tokens=pin.granted_tokens,
            wanted_tokens=wanted,
            blocks=pin.num_blocks,
            short=pin.short or ("budget" if pin.num_tokens < wanted else None),
            ttl_s=pin.ttl_s,
            expires_in_s=left,
        )
