"""One pin: what it holds, whose it is and until when; and counts of the blocks that pins hold.

Knows leases, blocks and seconds; nothing of budgets, or of which pins there are.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from radixkv.accounts import Account
from radixkv.identity.identity import CacheIdentity
from radixkv.identity.paths import digest_prefix
from radixkv.lease import Lease
from radixkv.nodes import Node
from radixkv.tokens import TOKEN_BYTES

_MAX_EXPIRED = 1024  # pins that ran out and are remembered

Short: TypeAlias = Literal["budget", "not_resident"]
"""Why less is held than was asked for."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin as it was when asked for. Times are in seconds of the clock of ``Pins``."""

    id: str
    """Random: it says nothing of other pins. Known to ``unpin`` only if something was granted."""
    owner: str
    name: str | None
    """A label of the owner's; several pins may have the same."""
    identity: CacheIdentity
    tokens: bytes
    """What was to be kept, as token bytes."""
    granted_tokens: int
    """How many of them are: from the first on."""
    num_blocks: int
    """Blocks held. What an owner's pins have in common counts once in its budget."""
    short: Short | None
    """Why that is not all, if it is not."""
    ttl_s: float | None
    created_at: float
    expires_at: float | None
    """If nobody uses it; None: it stays until it is unpinned."""

    @property
    def num_tokens(self) -> int:
        """How many tokens were to be kept."""
        return len(self.tokens) // TOKEN_BYTES


class Held:
    """A pin and its hold."""

    __slots__ = (
        "account",
        "created_at",
        "due",
        "expires_at",
        "id",
        "identity",
        "lease",
        "name",
        "owner",
        "prefix",
        "public",
        "short",
        "tokens",
        "ttl_s",
    )

    def __init__(
        self, owner: str, name: str | None, identity: CacheIdentity, tokens: bytes, now: float
    ) -> None:
        self.id = f"pin-{secrets.token_hex(8)}"
        self.owner = owner
        self.name = name
        self.identity = identity
        self.tokens = tokens
        self.created_at = now
        self.ttl_s: float | None = None
        self.expires_at: float | None = None
        self.due: float | None = None  # when the queue of expiries comes back to it
        self.lease: Lease | None = None
        self.account: Account | None = None  # whose blocks they are, but for the first ``public``
        self.public = 0
        self.prefix = b""  # the tokens that the lease holds
        self.short: Short | None = None

    def blocks(self) -> list[int]:
        return [] if self.lease is None else self.lease.references()

    def tail(self, stride: int) -> Node | None:
        """Return the tail on which the hold ends, if it ends on one."""
        if self.lease is None or self.lease._node is None:
            return None
        node = self.lease._node.at(self.lease._depth)
        return node if len(node.key) < stride else None

    def shown(self) -> Pin:
        return Pin(
            id=self.id,
            owner=self.owner,
            name=self.name,
            identity=self.identity,
            tokens=self.tokens,
            granted_tokens=len(self.prefix) // TOKEN_BYTES,
            num_blocks=len(self.blocks()),
            short=self.short,
            ttl_s=self.ttl_s,
            created_at=self.created_at,
            expires_at=self.expires_at,
        )


class BlockCounts(dict[int, int]):
    """Block -> how many pins hold it."""

    def add(self, blocks: Iterable[int]) -> int:
        """Count a pin's blocks; return how many of them none has held before."""
        before = len(self)
        for block in blocks:
            self[block] = self.get(block, 0) + 1
        return len(self) - before

    def take(self, blocks: Iterable[int]) -> int:
        """Count a pin's blocks no more; return how many of them none holds any more."""
        before = len(self)
        for block in blocks:
            if self[block] > 1:
                self[block] -= 1
            else:
                del self[block]
        return before - len(self)


class ExpiredPins:
    """Which prefixes pins held until they ran out: the last of them, as digests."""

    def __init__(self) -> None:
        self._when: OrderedDict[tuple[CacheIdentity, int, bytes], int] = OrderedDict()

    def note(self, identity: CacheIdentity, prefix: bytes, when: int) -> None:
        """Note that the pin of ``prefix`` has run out, at ``when`` by the clock of the tree."""
        key = (identity, len(prefix), digest_prefix(prefix))
        self._when.pop(key, None)
        self._when[key] = when
        if len(self._when) > _MAX_EXPIRED:
            self._when.popitem(last=False)

    def longest(self, identity: CacheIdentity, tokens: bytes, when: int) -> int:
        """Return how many of ``tokens`` were held by a pin that had run out by ``when``."""
        longest = 0
        for (other, size, digest), expired in self._when.items():
            if (
                expired <= when
                and longest < size <= len(tokens)
                and other == identity
                and digest_prefix(tokens[:size]) == digest
            ):
                longest = size
        return longest // TOKEN_BYTES
