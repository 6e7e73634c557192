"""The cache against the dull model of cache_world.py, in orders that nobody would think of.

Three tokens and small blocks, so that everything splits at once; two identities, or several tenants
who share prefixes and have quotas and floors; pools so small that something always has to go.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.cache_truth import MANY, PLAIN
from tests.cache_world import World

# Runs of equal tokens: short ones split small blocks, long ones fill the blocks of sixteen.
LENGTHS = [1, 1, 2, 3, 5, 15, 16, 17]
runs = st.tuples(st.integers(0, 2), st.sampled_from(LENGTHS))
texts = st.lists(runs, min_size=1, max_size=5).map(lambda rs: [t for t, n in rs for _ in range(n)])
whos = st.integers(0, 3)
choices = st.integers(0, 7)

if_room = precondition(lambda self: len(self.world.sequences) < 8)
if_leases = precondition(lambda self: self.world.leases)
if_any = precondition(lambda self: self.world.sequences)
if_quiet = precondition(lambda self: self.world.pick(0, reserved=False))
if_many = precondition(lambda self: len(self.world.identities) > 2)
if_reserved = precondition(lambda self: self.world.pick(0, reserved=True))


class CacheAgainstModel(RuleBasedStateMachine):
    kind: type[World] = World
    world: World

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 16]),
        num_blocks=st.integers(3, 14),
        many=st.booleans(),
        public=st.lists(texts, max_size=2),
        history=st.lists(texts, max_size=4),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        many: bool,
        public: list[list[int]],
        history: list[list[int]],
    ) -> None:
        self.world = self.kind(block_size, num_blocks, MANY if many else PLAIN)
        for text in public if many else []:
            self.world.declare(text)
        for i, text in enumerate(history):
            self.world.begin(i % 2, text, 4, tail=True)

    def who(self, who: int) -> int:
        return who % len(self.world.identities)

    def text(self, text: list[int], public: bool) -> list[int]:
        """``text``, or that behind a declared prefix: few would come upon one by chance."""
        borders = self.world.borders
        return [*borders[len(text) % len(borders)].tokens, *text] if borders and public else text

    @if_room
    @rule(
        who=whos,
        text=texts,
        stage=st.integers(0, 4),
        tail=st.booleans(),
        batch=st.booleans(),
        public=st.booleans(),
    )
    def begin(
        self, who: int, text: list[int], stage: int, tail: bool, batch: bool, public: bool
    ) -> None:
        self.world.begin(self.who(who), self.text(text, public), stage, tail, batch)

    @rule(who=whos, text=texts, spare=st.integers(0, 3), batch=st.booleans(), public=st.booleans())
    def acquire(self, who: int, text: list[int], spare: int, batch: bool, public: bool) -> None:
        self.world.acquire(self.who(who), self.text(text, public), spare, batch)

    @if_many
    @rule(text=texts)
    def declare(self, text: list[int]) -> None:
        self.world.declare(text)

    @precondition(lambda self: self.world.borders)
    @rule(choice=choices)
    def withdraw(self, choice: int) -> None:
        self.world.withdraw(choice)

    @if_many
    @rule(who=whos, quota=st.none() | st.integers(0, 8), floor=st.integers(0, 6))
    def share(self, who: int, quota: int | None, floor: int) -> None:
        self.world.share(who, quota, floor)

    @if_leases
    @rule(choice=choices)
    def open(self, choice: int) -> None:
        self.world.open(choice)

    @if_leases
    @rule(choice=choices, cancel=st.booleans())
    def give_up(self, choice: int, cancel: bool) -> None:
        self.world.give_up(choice, cancel)

    @if_quiet
    @rule(choice=choices, n=st.integers(0, 20), more=texts)
    def reserve(self, choice: int, n: int, more: list[int]) -> None:
        s = self.world.pick(choice, reserved=False)
        assert s is not None
        self.world.reserve(s, n, more)

    @if_reserved
    @rule(choice=choices, publish=st.sampled_from([None, False, True]))
    def compute(self, choice: int, publish: bool | None) -> None:
        s = self.world.pick(choice, reserved=True)
        assert s is not None
        self.world.compute(s)
        if publish is not None:
            self.world.publish(s, tail=publish)

    @if_any
    @rule(choice=choices, tail=st.booleans())
    def publish(self, choice: int, tail: bool) -> None:
        s = self.world.pick(choice)
        assert s is not None
        self.world.publish(s, tail)

    @if_room
    @if_quiet
    @rule(choice=choices)
    def fork(self, choice: int) -> None:
        s = self.world.pick(choice, reserved=False)
        assert s is not None
        self.world.fork(s)

    @if_quiet
    @rule(choice=choices, n=st.integers(0, 50))
    def truncate(self, choice: int, n: int) -> None:
        s = self.world.pick(choice, reserved=False)
        assert s is not None
        self.world.truncate(s, n)

    @if_any
    @rule(choice=choices, wrote=st.booleans())
    def abort(self, choice: int, wrote: bool) -> None:
        s = self.world.pick(choice)
        assert s is not None
        self.world.abort(s, wrote)

    @rule(n=st.integers(1, 4), who=whos)
    def press(self, n: int, who: int) -> None:
        self.world.press(n, self.who(who))

    @precondition(lambda self: self.world.resident)
    @rule()
    def reset(self) -> None:
        self.world.reset()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.prove()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def wander(seed: int, steps: int) -> World:
    """The same rules at random weights, without the price of a search: long lives, full pools."""
    rng = random.Random(seed)
    many = seed % 2 == 0
    size = rng.choice([1, 2, 3, 16])
    world = World(size, rng.randint(3, 20 if many else 40), MANY if many else PLAIN)
    num = len(world.identities)
    weights = [rng.random() ** 2 + 0.02 for _ in range(12)]
    weights[0] += many

    spoken: list[list[int]] = [[]]

    def words(most: int) -> list[int]:
        picks = [(rng.randrange(3), rng.choice(LENGTHS)) for _ in range(rng.randint(1, most))]
        return [t for t, n in picks for _ in range(n)]

    def text() -> list[int]:
        """Mostly what was said before up to some point, and then something else."""
        old = rng.choice(spoken)
        if world.borders and rng.random() < 0.2:
            old = list(rng.choice(world.borders).tokens)
        new = old[: rng.randrange(len(old) + 1)] if not world.borders or rng.random() < 0.3 else old
        new = new + words(1 if many else 3)
        spoken[: len(spoken) - 8] = []
        spoken.append(new[:80])
        return spoken[-1]

    def operate() -> None:
        match rng.randrange(4):
            case 0:
                said = rng.choice(spoken) or [0]
                world.declare(said[: rng.randint(1, len(said))])
            case 1 if world.borders and rng.random() < 0.3:
                world.withdraw(rng.randrange(8))
            case _:
                quota = rng.choice([None, rng.randrange(12)])
                world.share(rng.randrange(num), quota, rng.choice([0, 0, rng.randrange(6)]))

    if many:
        spoken = [words(rng.randint(1, 3)) for _ in range(3)]
        for said in spoken[:2]:
            world.declare(said)
    for _ in range(steps):
        choice, who, batch = rng.randrange(100), rng.randrange(num), rng.random() < 0.3
        quiet = world.pick(choice, reserved=False)
        waiting = world.pick(choice, reserved=True)
        some = world.pick(choice)
        match rng.choices(range(12), weights)[0]:
            case 0 if len(world.sequences) < 4:
                stage = rng.choice([0, 1, 2, 3, 4, 4, 4, 4])
                world.begin(who, text(), stage, rng.random() < 0.5, batch)
            case 1 if len(world.leases) < 4:
                world.acquire(who, text(), rng.randrange(4), batch)
            case 2 if world.leases:
                world.open(choice)
            case 3 if world.leases:
                world.give_up(choice, rng.random() < 0.5)
            case 4 if quiet:
                world.reserve(quiet, rng.randrange(20), text())
            case 5 if waiting:
                world.compute(waiting)
            case 6 if some:
                world.publish(some, rng.random() < 0.5)
            case 7 if quiet and len(world.sequences) < 6:
                world.fork(quiet)
            case 8 if quiet:
                world.truncate(quiet, rng.randrange(50))
            case 9 if some:
                world.abort(some, rng.random() < 0.5)
            case 10:
                world.press(rng.randint(1, 4), who)
            case 11 if many and rng.random() < 0.3:
                operate()
            case _:
                continue
        world.prove()
    if rng.random() < 0.2:
        world.reset()
    world.end()
    return world


@pytest.mark.parametrize("seed", range(120))
def test_a_long_random_life_keeps_the_books_and_the_kv_right(seed: int) -> None:
    """LEAK-2, LEAK-7, CORRECT-10: the same invariants over lives of some hundred steps."""
    wander(seed, 150)
