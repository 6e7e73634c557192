"""Proves that the pins' books are right; knows all that Pins knows, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.accounts import Account
from radixkv.pin import BlockCounts

if TYPE_CHECKING:
    from radixkv.pins import Pins


def check(pins: Pins) -> list[str]:
    """Return each broken invariant in words. O(blocks pinned)."""
    wrong = []
    blocks, blocks_of, accounts = (
        BlockCounts(),
        dict[str, BlockCounts](),
        dict[Account | None, int](),
    )
    queued = set(pins._queue)
    for held in pins._held.values():
        if held.lease is None or held.lease.released or held.lease not in pins._cache._live:
            wrong.append(f"{held.id} holds nothing")
            continue
        blocks_of.setdefault(held.owner, BlockCounts()).add(held.blocks())
        public = pins._cache.accounts.of(None)
        for account, part in (
            (held.account, held.blocks()[held.public :]),
            (public, held.blocks()[: held.public]),
        ):
            accounts[account] = accounts.get(account, 0) + blocks.add(part)
        if held.expires_at is not None and (held.due, held.id) not in queued:
            wrong.append(f"{held.id} will never expire")
        tail = held.tail(pins._cache.tree.stride)
        if tail is not None and held.id not in pins._on_tail.get(tail, {}):
            wrong.append(f"{held.id} would not notice that its tail is replaced")
    if blocks != pins._blocks or blocks_of != pins._blocks_of:
        wrong.append("the blocks that pins hold are counted wrongly")
    for account in pins._cache.accounts:
        if account.pinned != accounts.get(account, 0):
            wrong.append(f"{account.pinned} blocks of {account.tenant!r} are pinned by count")
    if sum(map(len, pins.prefixes.values())) != len(pins._held):
        wrong.append("the pins are not found by their prefixes")
    if sorted(key for group in pins._of_owner.values() for key in group) != sorted(pins._held):
        wrong.append("the pins are not found by owner as they are by id")
    return wrong
