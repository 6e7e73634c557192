"""What becomes of sequences that find no room to start in: who never will is told so."""

from __future__ import annotations

import pytest

from radixkv.errors import NeverFits
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.shares import TenantShare
from radixkv.service.engine.work import Plan
from radixkv.tokens import encode
from tests.fake_model import Rig, greedy, ids_of

A, B = Origin(tenant="a"), Origin(tenant="b")


def test_a_choice_that_never_fits_takes_its_sibling_out_of_the_very_step_that_starts_it() -> None:
    """Of two choices that were preempted one has grown too large for what others have pinned since:
    the request fails, and the other choice, which has just started, is computed no more."""
    rig = Rig(num_blocks=16, block_size=4)
    pinned = [7] * 20
    rig.submit(pinned, 1, origin=B)
    rig.run()
    stream = rig.submit([5] * 8, 30, n=2, seed=1, origin=A)
    rig.turn(2)
    rig.core.set_tenant("a", TenantShare(max_running=1))  # so that one waits while the other grows

    def preempt(index: int) -> Sequence:
        (seq,) = [seq for seq in rig.core.scheduler.running if seq.index == index]
        rig.core.scheduler.live.preempt(seq, Plan(0))
        return seq

    small = preempt(1)
    rig.turn(18)
    large = preempt(0)
    assert large.num_tokens > small.num_tokens + 16
    identity = rig._identify("fake", B)
    rig.cache.pins.set_budget("b", 16)
    more = [9] * 28
    for tokens in (pinned, more):
        if tokens is more:
            lease = rig.cache.acquire(identity, encode(more))
            with rig.cache.open(lease) as table:
                table.reserve(len(more))
                table.commit(len(more))
                table.publish(encode(more))
        rig.cache.pins.pin(identity, encode(tokens), owner="b")
    assert rig.cache.available_to("a") == 16 - 5 - 7
    rig.turn()
    assert stream.finished
    with pytest.raises(NeverFits):
        stream.result()
    after = rig.submit([5, 6], 4, origin=A)
    for _ in range(50):
        rig.turn()
    assert ids_of(after) == [greedy([5, 6], 4)]
    rig.cache.pins.unpin_owner("b")
    rig.assert_at_rest()
