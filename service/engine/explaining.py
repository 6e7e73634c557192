"""Why a prompt is not cached, as a request sent now would meet it: the cache, and who runs.

Knows token bytes, the cache's own account and the running sequences; nothing of text or HTTP.
Everything here runs on the engine thread, between two steps, and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.admission import blocks_for
from radixkv.tokens import common_prefix

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.explain import Explanation
    from radixkv.service.engine import request as requests
    from radixkv.service.engine.scheduler import Scheduler

SIBLING_TOKENS: Final = 2048
"""Tokens of what is resident instead that are handed out, to be read for causes."""
IN_FLIGHT: Final = "in_flight"
"""A running request is computing these tokens now."""
NO_ROOM: Final = "no_room"
"""Resident, but the pool is too small to hold the cached block and the copy to write into."""
DISABLED: Final = "disabled"
"""Not looked up at all: the cache is off, or the request wants every position computed."""


@dataclass(frozen=True, slots=True)
class Explained:
    """How much of a prompt is resident, and why the rest is not.

    ``sum(reasons.values()) == num_tokens - resident_tokens``, always.
    """

    identity: CacheIdentity
    num_tokens: int
    resident_tokens: int
    """What ``cached_tokens`` of the same request would be, sent now."""
    reasons: dict[str, int]
    """Tokens by reason; those without tokens are left out."""
    divergence: int | None
    """Index of the first token in which the prompt leaves what this namespace has resident."""
    sibling_tokens: tuple[int, ...]
    """What is resident there instead, from that token on; of the same namespace."""
    differs_in: tuple[str, ...]
    """Fields of the identity in which an identity of the same tenant, and of the same salt if
    there is one, differs that has more."""

    def __post_init__(self) -> None:
        missing = self.num_tokens - self.resident_tokens
        assert sum(self.reasons.values()) == missing, "an account that does not add up"


def explain(
    scheduler: Scheduler,
    identity: CacheIdentity,
    tokens: bytes,
    *,
    may_read: bool = True,
    every_salt: bool = False,
) -> Explained:
    """Account for ``tokens`` (big-endian uint32) as a request that is admitted next.

    ``may_read``: False for a request that reads nothing from the cache. ``every_salt``: tell what
    other salts of the tenant have, though ``identity`` has one; for an admin.
    """
    cache, num_tokens = scheduler.cache, len(tokens) // 4
    if not may_read:
        return _nothing(identity, num_tokens, {DISABLED: num_tokens})
    found = cache.explain(identity, tokens, context=SIBLING_TOKENS, every_salt=every_salt)
    reasons = _by_reason(found)
    resident = found.resident_tokens
    if not scheduler.running:
        usable = _usable(cache, identity, tokens, resident)
        if usable < resident:
            reasons[NO_ROOM] = reasons.get(NO_ROOM, 0) + resident - usable
            resident = usable
    else:
        coming = in_flight(scheduler.running, identity, tokens, resident, cache.block_size)
        if coming:
            _take(reasons, coming)
            reasons[IN_FLIGHT] = coming
    return _explained(found, identity, resident, reasons)


def explain_admission(
    cache: PrefixCache,
    running: Iterable[requests.Sequence],
    sequence: requests.Sequence,
    found_tokens: int,
    *,
    context: int = SIBLING_TOKENS,
) -> Explained:
    """Account for what ``sequence`` was given a moment ago, before anything else has changed.

    ``context``: tokens to tell of what is resident instead.
    """
    request = sequence.request
    tokens = bytes(sequence.tokens)
    num_tokens = sequence.num_tokens
    if not request.may_read_cache:
        return _nothing(request.identity, num_tokens, {DISABLED: num_tokens})
    found = cache.explain(request.identity, tokens, context=context)
    reasons, resident = _by_reason(found), found.resident_tokens
    if found_tokens < resident:
        reasons[NO_ROOM] = reasons.get(NO_ROOM, 0) + resident - found_tokens
        resident = found_tokens
    others = [other for other in running if other.request is not request]
    coming = in_flight(others, request.identity, tokens, resident, cache.block_size)
    if coming:
        _take(reasons, coming)
        reasons[IN_FLIGHT] = coming
    return _explained(found, request.identity, resident, reasons)


def in_flight(
    running: Iterable[requests.Sequence],
    identity: CacheIdentity,
    tokens: bytes,
    resident: int,
    block_size: int,
) -> int:
    """Tokens behind ``resident`` that one running sequence is computing, in whole blocks.

    Whole blocks, since only these can be found before that sequence ends.
    """
    most = 0
    for other in running:
        table = other.table
        if table is None or not other.request.may_publish or other.remaining <= 1:
            continue
        if other.request.identity != identity:
            continue
        shared = min(common_prefix(tokens, bytes(other.tokens)), len(tokens) // 4 - 1)
        whole = shared - shared % block_size
        if whole > table.num_tokens - table.num_tokens % block_size:
            most = max(most, whole - resident)
    return most


def _usable(cache: PrefixCache, identity: CacheIdentity, tokens: bytes, resident: int) -> int:
    """Of ``resident``, the tokens that fit beside the room for all of the prompt.

    Where nothing runs a request must start now, so admission gives up a partial block, or all,
    rather than wait (``Starter._try_open``). It can only matter in a pool that is nearly full of
    what cannot be evicted, or hardly larger than the prompt.
    """
    size, tenant = cache.block_size, identity.namespace.tenant
    need = blocks_for(len(tokens) // 4, size)
    if cache.available_to(tenant) > need:  # one more than needed: room for the source of a copy
        return resident
    for limit in (resident, resident - resident % size):
        room = cache.available_to(tenant) - _newly_held(cache, identity, tokens, limit)
        if room >= need - limit // size:
            return limit
    return 0


def _newly_held(cache: PrefixCache, identity: CacheIdentity, tokens: bytes, limit: int) -> int:
    """Evictable blocks that holding the first ``limit`` tokens would make unevictable."""
    _, num_whole, source, _, node = cache.tree.match(identity, tokens, 4 * limit)
    depth, count = num_whole + (source is not None), 0
    while node is not None and node.blocks:
        on_edge = min(node.end, depth) - node.start
        count += max(0, on_edge - node.num_held())
        node = node.parent
    return count


def _by_reason(found: Explanation) -> dict[str, int]:
    """Add up the tokens of each reason, which may stand at several places of the prompt."""
    sums: dict[str, int] = {}
    for reason, num_tokens in found.reasons:
        sums[reason] = sums.get(reason, 0) + num_tokens
    return sums


def _take(reasons: dict[str, int], num_tokens: int) -> None:
    """Take tokens from the reasons, in their order: the first ones are those that come first."""
    for reason in list(reasons):
        taken = min(reasons[reason], num_tokens)
        reasons[reason] -= taken
        num_tokens -= taken
    assert num_tokens == 0, "more in flight than is missing"


def _explained(
    found: Explanation, identity: CacheIdentity, resident: int, reasons: dict[str, int]
) -> Explained:
    return Explained(
        identity=identity,
        num_tokens=found.num_tokens,
        resident_tokens=resident,
        reasons={reason: n for reason, n in reasons.items() if n},
        divergence=found.divergence,
        sibling_tokens=tuple(found.sibling_tokens or ()),
        differs_in=tuple(found.other or ()),
    )


def _nothing(identity: CacheIdentity, num_tokens: int, reasons: dict[str, int]) -> Explained:
    return Explained(identity, num_tokens, 0, reasons, None, (), ())
