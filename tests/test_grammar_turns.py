"""Work of several tenants in a few threads: who is next, how many may wait, who shares."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from queue import Queue

import pytest

from radixkv.errors import Overloaded
from radixkv.service.engine.grammar_turns import (
    MAX_RUNNING_OF_TENANT,
    MAX_WAITING_OF_TENANT,
    TenantTurns,
)

WAIT_S = 60


class World:
    """Work that begins when it may, tells so, and ends when it is let."""

    def __init__(self) -> None:
        self.turns: TenantTurns[str] = TenantTurns("test-turns")
        self.begun: Queue[str] = Queue()
        self.gates: dict[str, threading.Event] = {}

    def ask(self, name: str) -> Future[str]:
        """Ask for ``name``, whose first letter is the tenant."""
        gate = self.gates.setdefault(name, threading.Event())

        def work() -> str:
            self.begun.put(name)
            assert gate.wait(WAIT_S)
            if name.endswith("!"):
                raise ValueError(name)
            return name.upper()

        return self.turns.submit(name[0], name, work)

    def begins(self, name: str) -> None:
        assert self.begun.get(timeout=WAIT_S) == name

    def ends(self, name: str) -> None:
        self.gates[name].set()

    def fill(self, tenant: str) -> list[Future[str]]:
        """Ask for all that ``tenant`` may have running and waiting."""
        asked = []
        for i in range(MAX_RUNNING_OF_TENANT + MAX_WAITING_OF_TENANT):
            asked.append(self.ask(f"{tenant}{i}"))
            if i < MAX_RUNNING_OF_TENANT:
                self.begins(f"{tenant}{i}")
        return asked

    def end_all(self, asked: list[Future[str]]) -> list[str]:
        for gate in self.gates.values():
            gate.set()
        return [future.result(WAIT_S) for future in asked]


def test_tenants_take_turns_and_none_has_all_threads() -> None:
    world = World()
    asked = []
    for name in ("a1", "a2"):
        asked.append(world.ask(name))
        world.begins(name)
    asked += [world.ask("a3"), world.ask("a4"), world.ask("b1")]
    world.begins("b1")  # at once, though two of another tenant's were there before
    asked += [world.ask("b2"), world.ask("c1")]
    for ends, begins in [("b1", "b2"), ("a1", "a3"), ("b2", "c1"), ("a2", "a4")]:
        world.ends(ends)
        world.begins(begins)
    assert world.end_all(asked) == ["A1", "A2", "A3", "A4", "B1", "B2", "C1"]


def test_so_much_of_one_tenant_waits_and_that_is_no_others_matter() -> None:
    world = World()
    asked = world.fill("a")
    assert world.turns.num_waiting("a") == MAX_WAITING_OF_TENANT
    with pytest.raises(Overloaded, match="16 grammars of yours wait") as refused:
        world.ask("a99")
    assert refused.value.retry_after_s > 0
    asked.append(world.ask("a5"))  # is waited for anyway
    asked.append(world.ask("b1"))
    world.begins("b1")
    assert len(world.end_all(asked)) == len(asked)
    again = world.ask("a99")
    world.end_all([again])


def test_all_who_ask_for_the_same_wait_for_one_piece_of_work() -> None:
    world = World()
    first = world.ask("a1")
    world.begins("a1")
    assert world.end_all([first, world.ask("a1")]) == ["A1", "A1"]
    failing = [world.ask("a!") for _ in range(2)]
    world.begins("a!")
    world.ends("a!")
    for future in failing:
        with pytest.raises(ValueError, match="a!"):
            future.result(WAIT_S)
    world.begun.put("nothing else was begun")
    world.begins("nothing else was begun")


def test_work_that_nobody_waits_for_any_more_is_not_begun_and_takes_no_room() -> None:
    world = World()
    asked = world.fill("a")
    both, alone = world.ask("a10"), asked.pop(5)
    assert asked[9] is not both and asked.pop(9).cancel()  # one of the two who wait for a10
    assert alone.cancel() and world.turns.num_waiting("a") == MAX_WAITING_OF_TENANT - 1
    asked.append(world.ask("a99"))
    assert asked[0].cancel(), "who waits for what has begun may leave as well"
    with pytest.raises(CancelledError):
        asked.pop(0).result(WAIT_S)
    world.end_all([both, *asked])
    begun = [world.begun.get(timeout=WAIT_S) for _ in range(MAX_WAITING_OF_TENANT)]
    assert "a10" in begun and "a99" in begun and "a5" not in begun
    assert world.turns.num_waiting("a") == 0
