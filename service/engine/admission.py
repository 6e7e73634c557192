"""Whether a waiting sequence may start: single flight, and whether the blocks suffice.

Knows sequences, token bytes and block counts; nothing of tensors, threads, time or turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixkv import tokens as token_codec
from radixkv.service.engine.request import Sequence


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
        if other.request.origin.batch and not seq.request.origin.batch:
            continue  # its turn to be computed comes after ours
        if mine is None:
            mine = seq.key
        shared = token_codec.common_prefix(mine, other.key)
        shared = min(shared, seq.num_tokens - 1)
        whole = shared - shared % block_size
        if whole > cached and whole > table.num_tokens - table.num_tokens % block_size:
            return other
    return None


def projected_growth(seq: Sequence, lookahead_tokens: int, block_size: int) -> int:
    """Blocks that a running sequence will soon take: the rest of its prefill and some output."""
    table = seq.table
    assert table is not None, "a running sequence has a table"
    soon = min(seq.tokens_to_come, lookahead_tokens)
    own = max(0, blocks_for(seq.num_tokens + soon, block_size) - table.num_blocks)
    if table.num_tokens == table.cached_tokens and table.num_tokens % block_size:
        own += 1  # it will copy the block of which it found the beginning
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
    if seq.request.asleep:  # beams that were preempted, and have grown already
        shared = len(seq.request.prompt_ids) // block_size
        each = blocks_for(seq.num_tokens + soon, block_size) - shared
        return seq.request.unborn * each
    return seq.request.unborn * (1 + blocks_for(soon, block_size))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)
