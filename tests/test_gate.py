"""Who is let in: bounds in all and by tenant, and that every refusal is told."""

from __future__ import annotations

import threading

import pytest

from radixkv.errors import EngineDead, Overloaded
from radixkv.service.engine.gate import Gate
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.service.engine.shares import TenantShare

LOUD, QUIET = Origin(tenant="loud"), Origin(tenant="quiet")


def gate(refused: list[Origin], *, max_num_seqs: int = 2, max_queue: int = 2) -> Gate:
    return Gate(max_num_seqs=max_num_seqs, max_queue=max_queue, refused=refused.append)


def test_as_many_are_let_in_as_may_run_and_wait() -> None:
    refused: list[Origin] = []
    full = gate(refused)
    full.enter(3, LOUD)
    full.enter(1, QUIET)
    with pytest.raises(Overloaded, match="4 choices run or wait, and 4 may"):
        full.enter(1, QUIET)
    assert refused == [QUIET]
    full.leave(LOUD, 3)
    full.enter(3, QUIET)
    assert refused == [QUIET]


def test_a_request_that_is_larger_than_the_limit_comes_in_alone() -> None:
    refused: list[Origin] = []
    empty = gate(refused)
    empty.enter(9, LOCAL)
    with pytest.raises(Overloaded):
        empty.enter(1, LOCAL)
    empty.leave(LOCAL, 9)
    empty.enter(1, LOCAL)


def test_a_tenant_is_held_to_its_own_limit_and_others_are_not() -> None:
    refused: list[Origin] = []
    shared = gate(refused, max_queue=20)
    shared.set_share("loud", TenantShare(max_running=1, max_waiting=1))
    shared.enter(1, LOUD)
    shared.enter(1, LOUD)
    with pytest.raises(Overloaded, match="max_running 1 and max_waiting 1: 2 choices"):
        shared.enter(1, LOUD)
    shared.enter(5, QUIET)
    assert refused == [LOUD]
    shared.leave(LOUD, 1)
    shared.enter(1, LOUD)


def test_a_closed_gate_lets_nobody_in_and_waits_for_all_to_leave() -> None:
    closing = gate([])
    closing.enter(2, LOCAL)
    closing.close()
    closing.close()
    with pytest.raises(EngineDead, match="shutting down"):
        closing.enter(1, LOCAL)
    assert not closing.wait_until_empty(0, unless=lambda: False), "in time, not by waiting"
    assert not closing.wait_until_empty(60, unless=lambda: True)
    leaving = threading.Thread(target=closing.leave, args=(LOCAL, 2))
    leaving.start()
    assert closing.wait_until_empty(60, unless=lambda: False)
    leaving.join()
