"""Beams among those who run: moved from one to another, preempted together, woken together.

Knows running sequences, their tables and the cache; nothing of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cache import PrefixCache
from radixkv.table import BlockTable
from radixkv.tokens import common_prefix

if TYPE_CHECKING:
    from radixkv.service.engine.request import Request, Sequence
    from radixkv.service.engine.running import Running
    from radixkv.service.engine.work import Plan


def move(seq: Sequence, parent: Sequence) -> None:
    """Let ``seq``, whose beam has died, go on from where ``parent`` is, on the same blocks."""
    assert seq.table is not None and parent.table is not None and seq.saved is None
    seq.table.release()
    seq.table = parent.table.fork()
    seq.ids, seq.tokens, seq.high = parent.ids.copy(), parent.tokens.copy(), parent.high


def must_wait(seq: Sequence, running: Running, plan: Plan) -> bool:
    """Tell whether ``seq``, which is of the latest request and lacks a block, should keep what it
    has: it is a beam, and a sibling's step or that of an older request will make room.

    A sibling's does where all are to copy a block that the tree holds as well: when the others have
    their copies, the last may have the block itself.
    """
    request = seq.request
    if request.beams is None:
        return False
    siblings_go = any(other in plan.works for other in request.sequences)
    return siblings_go or running.sequences[0].request is not request


def preempt_beams(request: Request, running: Running, plan: Plan) -> Sequence:
    """Preempt all beams of a request; return the first, which stands for all among those who wait.

    One alone would hold up the others, which would keep their blocks from everybody meanwhile.
    """
    group = request.beams
    assert group is not None
    first, *others = request.sequences
    for member in reversed(request.sequences):
        assert member.table is not None
        if member.remaining == 0:  # its last token's logits will be wanted again
            member.publish(tail=True)
            member.table.truncate(member.num_tokens - 1)
        running.lay_down(member, plan)
    request.sequences[:] = [first]
    request.forked = False
    group.asleep = others
    group.found.clear()
    return first


def wake_beams(request: Request, running: Running, cache: PrefixCache) -> None:
    """Let the beams that sleep run beside the first one, whose tokens are computed.

    Each begins with what it shares with the first, or with what is cached if that is more.
    """
    assert request.beams is not None
    (first,) = request.sequences
    first.publish()
    woken = request.beams.wake()
    for seq in woken:
        seq.table = _open(seq, first, cache)
        request.sequences.append(seq)
    request.forked = True
    request.account.num_running += len(woken)
    at = running.sequences.index(first) + 1
    running.sequences[at:at] = woken


def _open(seq: Sequence, first: Sequence, cache: PrefixCache) -> BlockTable:
    assert first.table is not None
    request, mine = seq.request, seq.key
    shared = min(common_prefix(first.key, mine), seq.num_tokens - 1)
    cached = cache.lookup(request.identity, mine)
    if shared >= cached:
        table = first.table.fork()
        table.truncate(seq.takes_of(shared, cache.block_size))
        return table
    lease = cache.acquire(
        request.identity,
        mine,
        max_cached=seq.takes_of(cached, cache.block_size),
        resumed=True,
        batch=request.origin.batch,
    )
    return cache.open(lease)


def check_beams(request: Request) -> list[str]:
    """Return what is wrong with the beams of a request of which one runs, in words. O(beams)."""
    group, wrong = request.beams, []
    assert group is not None
    asleep, awake = group.asleep, request.sequences
    if set(group.ranked) != {*awake, *asleep} or len(group.ranked) != len(awake) + len(asleep):
        wrong.append(f"{len(group.ranked)} beams, {len(awake)} awake, {len(asleep)} asleep")
    if any(seq.table is not None for seq in asleep) or any(seq.table is None for seq in awake):
        wrong.append("a beam sleeps and holds blocks, or runs and holds none")
    lengths = {seq.num_tokens for seq in group.ranked}
    if len(lengths) > 1:
        wrong.append(f"beams of one request have {sorted(lengths)} tokens")
    if not group.found.keys() <= set(awake) or any(seq.remaining for seq in group.found):
        wrong.append("what may come next is known of a beam that is not computed")
    return wrong
