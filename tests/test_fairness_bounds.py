"""Nobody is passed for ever, saves up without end or owes without end, whatever the arrivals."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.engine.fairness import MAX_HELD
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.shares import Account, TenantShare
from tests.fake_model import Rig
from tests.test_fairness import LOUD, QUIET, Load, prompt

STEP = 16


def rig_with(burst: int = 64, places: int = 32) -> Rig:
    rig = Rig(num_blocks=1024, max_batch_tokens=STEP, max_num_seqs=places, force_miss=True)
    rig.core.scheduler.fairness.burst = burst
    return rig


def account(rig: Rig, origin: Origin) -> Account:
    return rig.core.scheduler.fairness.account(origin.tenant, origin.batch)


@pytest.mark.parametrize("weight", [1.0, 1000.0])
def test_steps_are_not_cut_short_for_ever_however_heavy_the_one_for_whom_they_are(
    weight: float,
) -> None:
    """One that ends a short prompt in every step is served at once; what the steps have left goes
    to others all the same, if not in each of them."""
    rig = rig_with(burst=2048)
    rig.core.scheduler.set_share(QUIET.tenant, TenantShare(weight=weight))
    for i in range(8):
        rig.submit(prompt(300, i), 1, origin=LOUD)
    rig.turn(30)
    loud = account(rig, LOUD)
    waited, longest = 0, 0
    for i in range(6 * MAX_HELD):
        rig.submit(prompt(2, 100 + i), 1, origin=QUIET)
        before = loud.prompt_tokens_computed
        rig.turn()
        waited = 0 if loud.prompt_tokens_computed > before else waited + 1
        longest = max(longest, waited)
    assert 1 < longest <= MAX_HELD


def test_no_number_of_newcomers_passes_one_whose_prompt_waits_for_ever() -> None:
    """Each of them comes for the first time, and so has never had anything."""
    rig = rig_with()
    for i in range(4):
        rig.submit(prompt(300, i), 1, origin=LOUD)
    rig.turn(20)
    loud = account(rig, LOUD)
    before = loud.prompt_tokens_computed
    for i in range(200):
        rig.submit(prompt(STEP, 100 + i), 1, origin=Origin(tenant=f"new{i}"))
        rig.turn()
        if loud.prompt_tokens_computed > before:
            break
    # What it is ahead by, a burst, is made good at the rate at which each of the two is due tokens.
    assert 1 < i <= 2 * (64 + STEP) // STEP + 2


def test_what_a_tenant_left_to_others_is_not_saved_up_beyond_a_burst() -> None:
    """It asked for a little now and then, and two others for all that there was."""
    rig = rig_with()
    louds = [Origin(tenant="loud1"), Origin(tenant="loud2")]
    for i in range(60):
        rig.submit(prompt(100, i), 1, origin=louds[i % 2])
    for i in range(50):
        rig.submit(prompt(3, 100 + i), 1, origin=QUIET)
        rig.turn(4)
    for i in range(6):
        rig.submit(prompt(100, 500 + i), 1, origin=QUIET)
    quiet, ahead = account(rig, QUIET), []
    before = [account(rig, loud).prompt_tokens_computed for loud in louds]
    start = quiet.prompt_tokens_computed
    for _ in range(20):
        rig.turn()
        had = [account(rig, loud).prompt_tokens_computed for loud in louds]
        least = min(now - old for now, old in zip(had, before, strict=True))
        ahead.append(quiet.prompt_tokens_computed - start - least)
    assert 64 - STEP <= max(ahead) <= 64 + 2 * STEP


def test_one_that_comes_while_nobody_else_computes_has_saved_up_no_more_than_a_burst() -> None:
    """Its long prompt was begun when the other's was done: nobody was there to compare it with."""
    rig = rig_with()
    for i in range(6):
        rig.submit(prompt(100, i), 1, origin=LOUD)
    rig.run()
    for i in range(6):
        rig.submit(prompt(100, 50 + i), 1, origin=QUIET)
    rig.turn()
    rig.submit(prompt(100, 99), 1, origin=LOUD)
    rig.turn(64 // STEP + 3)
    assert account(rig, LOUD).prompt_tokens_computed > 600


def test_one_that_asks_now_and_then_goes_first_beside_several_that_always_ask() -> None:
    rig = rig_with(burst=256)
    for i in range(60):
        rig.submit(prompt(100, i), 1, origin=Origin(tenant=f"loud{i % 3}"))
    rig.turn(60)
    for i in range(3):
        quiet = rig.submit(prompt(6 * STEP, 100 + i), 1, origin=QUIET)
        rig.turn(6 + 1)
        assert quiet.finished, f"prompt {i}"
        rig.turn(30)


def test_what_a_long_answer_took_of_others_steps_is_owed_up_to_a_burst() -> None:
    """Its tokens come first in each step; its next prompt does not wait for all of them."""
    rig = rig_with(places=STEP)
    talking = [rig.submit(prompt(1, i), 400, origin=LOUD) for i in range(STEP - 4)]
    for i in range(30):
        rig.submit(prompt(100, 100 + i), 1, origin=QUIET)
    rig.turn(300)
    assert account(rig, LOUD).ran - account(rig, QUIET).ran <= 64 + 2 * STEP
    for stream in talking:
        stream.abort()
    late = rig.submit(prompt(STEP, 999), 1, origin=LOUD)
    rig.turn(64 // STEP + 4)
    assert late.finished


def test_who_waits_alone_is_not_charged_for_keeping_itself_waiting() -> None:
    """Others run, and want no more: what it had keeps nobody from starting. Else newcomers, each
    of whom is owed nothing by it, would all go before it."""
    rig = Rig(num_blocks=512, max_batch_tokens=STEP, max_num_seqs=4)
    rig.submit(prompt(4, 1), 300, origin=QUIET)
    alone = Load(rig, LOUD, 1, 1)
    for i in range(6):
        rig.submit(prompt(9, 50 + i), 40, origin=LOUD)
    ahead = []
    for _ in range(60):
        rig.turn()
        ahead.append(alone.account.level - rig.core.scheduler.fairness._lanes[False].level)
    assert alone.account.cost > 150
    assert max(ahead) <= STEP


def test_a_step_costs_no_more_for_each_of_thousands_of_tenants_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are, few of them are looked at, and all of them but a few times."""
    rig = rig_with(places=64)
    rig.submit(prompt(4000, 1), 90, origin=LOUD)
    rig.turn(254)
    for i in range(600):
        rig.submit(prompt(80, i), 1, origin=Origin(tenant=f"t{i}"))
    levels, real = 0, Account.admission_level

    def counting(one: Account) -> float:
        nonlocal levels
        levels += 1
        return real.fget(one)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Account, "admission_level", property(counting))
    rig.core.turn()
    assert rig.core.scheduler.fairness.account("t1").num_waiting
    assert 600 <= levels <= 6 * 600


def test_those_at_their_own_limit_do_not_keep_others_from_being_looked_at() -> None:
    """They cannot start, so they take none of a step's look-ups."""
    rig = Rig(num_blocks=1024, max_batch_tokens=256, max_num_seqs=256)
    for i in range(150):
        rig.core.scheduler.set_share(f"full{i}", TenantShare(max_running=1))
        for k in range(2):
            rig.submit([3 + i % 60, 3 + i // 60, 3 + k], 60, origin=Origin(tenant=f"full{i}"))
    for _ in range(12):
        rig.core.turn()
    other = rig.submit(prompt(5, 1), 1, origin=QUIET)
    rig.turn()
    assert other.admitted_s is not None


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.1, 1.0, 10.0]), min_size=2, max_size=5),
    places=st.integers(2, 8),
    seed=st.integers(0, 10_000),
    pause=st.booleans(),
)
def test_no_tenant_that_waits_is_passed_for_ever(
    weights: list[float], places: int, seed: int, pause: bool
) -> None:
    """Bursts, trickles and newcomers by chance. Each that waits has something within the steps in
    which all others together can be served what their weights make them due."""
    rig, rng = rig_with(burst=32, places=places), random.Random(seed)
    names = [f"t{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        rig.core.scheduler.set_share(name, TenantShare(weight=weight))
    fairness = rig.core.scheduler.fairness
    cost: dict[str, int] = {}
    waits: Counter[str] = Counter()
    heaviest = sum(weights) + places
    for turn in range(120):
        name = rng.choice([*names, f"new{turn}"])
        for _ in range(rng.choice([0, 1, 1, 4])):
            rig.submit(
                [rng.randrange(3, 64) for _ in range(rng.choice([1, 3, STEP, 50]))],
                rng.randint(1, 4),
                origin=Origin(tenant=name),
            )
        if pause and rig.core.scheduler.idle:
            rig.runner.now_s += rng.random()
        rig.core.turn()
        for one in fairness:
            if one.cost != cost.get(one.tenant, 0) or not one.num_waiting + one.num_running:
                waits[one.tenant] = 0
            else:
                waits[one.tenant] += 1
                # A debt: a burst, or one step or request of so light a one; a token less a step.
                debt = 2 * 32 + (STEP + 54) / one.share.weight
                assert waits[one.tenant] <= 20 + places * 4 + debt * heaviest / STEP * MAX_HELD
            cost[one.tenant] = one.cost
    assert rig.core.check() == []


@settings(max_examples=8, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.25, 1.0, 4.0, 32.0]), min_size=2, max_size=3),
    seed=st.integers(0, 999),
)
def test_prompts_of_tenants_that_always_have_some_are_computed_by_weight_whoever_else_comes(
    weights: list[float], seed: int
) -> None:
    """With newcomers that end prompts between, and after an hour of rest: what counts is when both
    have prompts that wait for tokens."""
    rig, rng = rig_with(), random.Random(seed)
    origins = [Origin(tenant=f"t{i}") for i in range(len(weights))]
    for origin, weight in zip(origins, weights, strict=True):
        rig.core.scheduler.set_share(origin.tenant, TenantShare(weight=weight))
    rig.submit(prompt(90, 1), 1, origin=origins[0])
    while not rig.core.scheduler.idle:
        rig.turn()
    rig.runner.now_s += 3600
    for i in range(3):
        for origin in origins:
            rig.submit(prompt(1200, 10 + i), 1, origin=origin)
    rig.turn()
    start = [account(rig, origin).cost for origin in origins]
    for i in range(120):
        if rng.random() < 0.3:
            rig.submit(prompt(rng.randint(2, 20), 99), 1, origin=Origin(tenant=f"new{i % 7}"))
        rig.turn()
        had = [
            (account(rig, origin).cost - old) / weight
            for origin, old, weight in zip(origins, start, weights, strict=True)
        ]
        if any(account(rig, origin).cost > 3500 for origin in origins):
            break
        assert max(had) - min(had) <= 64 + 2 * STEP / min(weights) + STEP
