"""Who may start next: the order of the waiting, single flight, and whether the blocks suffice.

Knows sequences, token bytes and block counts; nothing of tensors, threads or time.

Order: the longest cached prefix first, since its KV is cheapest now and may be evicted soon
(RadixAttention, section 3). That alone starves cold requests, so each sequence counts how many
later ones went ahead of it; at ``MAX_SKIPS`` it goes before everything younger, and while it cannot
start, because it has no room or another computes its prefix, nothing younger is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radixkv import tokens as token_codec
from radixkv.cache import PrefixCache
from radixkv.service.engine.request import Sequence

MAX_SKIPS = 16
WINDOW = 128
"""Waiting sequences that are looked up in one step; the oldest come first into the window."""


class Waiting:
    """The sequences that wait, oldest first; holds no blocks at all (SCHED-3)."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        """Put ``seq`` at its place by age: a preempted one comes back before younger ones."""
        at = len(self._queue)
        while at and self._queue[at - 1].order > seq.order:
            at -= 1
        self._queue.insert(at, seq)

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out; raises ValueError if it does not wait."""
        self._queue.remove(seq)

    @property
    def overdue(self) -> Sequence | None:
        """The oldest of those that were passed over as often as may be."""
        return next((seq for seq in self._queue if seq.skipped >= MAX_SKIPS), None)

    def candidates(self, cache: PrefixCache) -> list[tuple[Sequence, int]]:
        """Sequences in the order in which to try them, with the tokens the cache has for each.

        The aged ones first, by age; then by cached tokens, longest first, ties by age. Touches
        nothing in the cache. O(WINDOW * look-up).
        """
        window = self._queue[:WINDOW]
        found = [(seq, cached_tokens(cache, seq)) for seq in window]
        found.sort(
            key=lambda item: (
                (0, 0, item[0].order)
                if item[0].skipped >= MAX_SKIPS
                else (1, -item[1], item[0].order)
            )
        )
        return found

    def note_admitted(self, admitted: Sequence) -> None:
        """Count, for each older sequence that still waits, that a younger one went ahead."""
        for seq in self._queue:
            if seq.order > admitted.order:
                break
            seq.skipped += 1


def cached_tokens(cache: PrefixCache, seq: Sequence) -> int:
    """Tokens of ``seq`` that an acquisition would find; at least one is left to compute."""
    if not seq.request.may_read_cache:
        return 0
    return cache.lookup(seq.request.identity, bytes(seq.tokens))


def leader_of(
    seq: Sequence, cached: int, running: Iterable[Sequence], block_size: int
) -> Sequence | None:
    """The running sequence that is computing a prefix which ``seq`` would compute as well.

    Single flight: while one sequence computes a cold prefix, others that want it wait for its
    blocks instead of computing it again (SCHED-4). Only whole blocks count, since only these are
    published before the leader ends; if the leader goes away, so does the reason to wait.
    """
    if not seq.request.may_read_cache:
        return None
    mine: bytes | None = None
    for other in running:
        table = other.table
        if table is None or not other.request.may_publish or other.remaining <= 1:
            continue
        if other.request.identity != seq.request.identity:
            continue
        if mine is None:
            mine = bytes(seq.tokens)
        shared = token_codec.common_prefix(mine, bytes(other.tokens))
        shared = min(shared, seq.num_tokens - 1)
        whole = shared - shared % block_size
        if whole > cached and whole > table.num_tokens - table.num_tokens % block_size:
            return other
    return None


def projected_growth(seq: Sequence, lookahead_tokens: int, block_size: int) -> int:
    """Blocks that a running sequence will soon take: the rest of its prefill and some output."""
    assert seq.table is not None, "a running sequence has a table"
    soon = min(seq.tokens_to_come, lookahead_tokens)
    own = max(0, blocks_for(seq.num_tokens + soon, block_size) - seq.table.num_blocks)
    return own + _growth_of_unborn(seq, soon, block_size)


def has_room(
    seq: Sequence, num_whole: int, available: int, growth: int, block_size: int, *, alone: bool
) -> bool:
    """Whether ``seq``, holding ``num_whole`` cached blocks, can run beside the others' ``growth``.

    Alone it needs no room to grow: its tokens must fit, and the engine has refused what as a whole
    never would.
    """
    soon = 0 if alone else min(seq.tokens_to_come, block_size)
    own = blocks_for(seq.num_tokens + soon, block_size) - num_whole
    if alone:
        return available >= own
    return available - growth >= own + _growth_of_unborn(seq, soon, block_size)


def _growth_of_unborn(seq: Sequence, soon: int, block_size: int) -> int:
    """The other choices share the prompt's whole blocks; each copies the tail and grows."""
    return seq.request.unborn * (1 + blocks_for(soon, block_size))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)
