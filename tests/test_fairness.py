"""Fairness between tenants, on the fake model: shares, bounds, urgency, batch work and limits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import Engine
from radixkv.errors import InvalidConfig, Overloaded
from radixkv.service.engine.fairness import Fairness
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.shares import TenantShare
from radixkv.service.engine.stream import Stream
from radixkv.service.engine.turns import MAX_PASSES
from radixkv.service.engine.waiting import MAX_SKIPS
from tests import tiny_models
from tests.fake_model import Rig, greedy, ids_of

QUIET, LOUD = Origin(tenant="quiet"), Origin(tenant="loud")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


class Load:
    """A tenant that keeps ``depth`` requests in the queue, of random lengths."""

    def __init__(self, rig: Rig, origin: Origin, depth: int, seed: int, most: int = 20) -> None:
        self.rig, self.origin, self.depth, self.most = rig, origin, depth, most
        self.rng = random.Random(seed)
        self.account = rig.core.scheduler.fairness.account(origin.tenant, origin.batch)
        self.streams: list[Stream] = []

    def feed(self) -> None:
        for _ in range(self.depth - self.account.num_waiting):
            ids = [self.rng.randrange(3, 64) for _ in range(self.rng.randint(1, self.most))]
            max_tokens = self.rng.randint(1, 8)
            self.streams.append(self.rig.submit(ids, max_tokens, origin=self.origin))

    def admitted(self, before_s: float = math.inf) -> int:
        started = (stream.admitted_s for stream in self.streams)
        return sum(at is not None and at < before_s for at in started)


def turns_until_admitted(rig: Rig, stream: Stream, loads: list[Load], limit: int = 500) -> int:
    for turns in range(limit):
        if stream.admitted_s is not None:
            return turns
        for load in loads:
            load.feed()
        rig.turn()
    raise AssertionError(f"not started within {limit} steps")


@settings(max_examples=6, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=3),
    most=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    places=st.integers(3, 6),
    seed=st.integers(0, 99),
)
def test_what_tenants_that_all_wait_are_served_follows_their_weights(
    weights: list[float], most: list[int], places: int, seed: int
) -> None:
    """Whatever the lengths of their requests: the difference stays within a bound, so that the
    ratio converges."""
    rig = Rig(num_blocks=256, max_batch_tokens=32, max_num_seqs=places)
    loads = []
    for i, weight in enumerate(weights):
        rig.core.scheduler.set_share(f"t{i}", TenantShare(weight=weight))
        loads.append(Load(rig, Origin(tenant=f"t{i}"), 4, seed + i, most[i]))
    served: list[list[float]] = []
    for _ in range(250):
        for load in loads:
            load.feed()
        rig.turn()
        served.append([load.account.cost / load.account.share.weight for load in loads])
    # A quantum and a prompt more in one turn; what its running ones say, or have yet to compute.
    bound = 32 + (max(most) + places * (8 + max(most))) / min(weights)
    assert all(max(levels) - min(levels) <= bound for levels in served)
    assert sum(served[-1]) > bound, "too little was served to tell"


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(0, 30), st.integers(1, 30))
def test_a_loud_tenant_does_not_delay_a_quiet_one_beyond_the_next_free_place(
    seed: int, places: int, warm: int, length: int
) -> None:
    """At most MAX_PASSES admissions of others go before it, here none: with room for all, the next
    place is the quiet one's, and it is free when the shortest of those that run has ended. Others
    may start behind it in the same step, if several places are free."""
    rig = Rig(num_blocks=512, max_batch_tokens=16, max_num_seqs=places)
    loud = Load(rig, LOUD, 40, seed)
    for _ in range(5 + warm):
        loud.feed()
        rig.turn()
    before = loud.admitted()
    stream = rig.submit(prompt(length, seed), 3, origin=QUIET)
    # All that run may have their prompts to compute yet, 20 tokens each, and then 8 to say.
    bound = places * 20 // (16 - places) + 2 + 8
    assert turns_until_admitted(rig, stream, [loud]) <= bound
    assert stream.admitted_s is not None
    assert loud.admitted(stream.admitted_s) == before
    turns = 0
    while not stream.finished:  # its prompt is computed before those of the loud one
        loud.feed()
        rig.turn()
        turns += 1
    assert turns <= length // (16 - places) + 2 + 3


def test_prompts_admitted_while_a_tenant_was_alone_do_not_keep_every_step_to_it() -> None:
    """The tokens of a step are shared out as well, not only the places."""
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    for i in range(8):
        rig.submit(prompt(300, i), 1, origin=LOUD)
        rig.turn()
    quiet = rig.submit(prompt(12, 99), 2, origin=QUIET)
    rig.turn(4)
    assert quiet.finished
    assert ids_of(quiet) == [greedy(prompt(12, 99), 2)]


def test_the_prompt_of_one_who_asks_now_and_then_is_computed_in_one_go() -> None:
    """Beside one who always asks it takes the steps that it takes alone, and one more at most."""
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    for i in range(8):
        rig.submit(prompt(300, i), 1, origin=LOUD)
    rig.turn(30)
    for i in range(3):
        quiet = rig.submit(prompt(96, 90 + i), 1, origin=QUIET)
        rig.turn(96 // 16 + 1)
        assert quiet.finished, f"prompt {i}"
        rig.turn(8)


def test_a_step_in_which_the_prompt_of_one_who_asks_now_and_then_ends_is_not_filled_up() -> None:
    """Its first token comes when the step is over; the loud one's prompts go on in the next."""
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    for i in range(8):
        rig.submit(prompt(300, i), 1, origin=LOUD)
    rig.turn(30)
    for length in (16 + 3, 5):
        quiet = rig.submit(prompt(length, 90 + length), 2, origin=QUIET)
        rig.turn(length // 16)
        before = rig.core.counters.step_tokens
        rig.turn()
        assert rig.core.counters.step_tokens - before == length % 16
        before = rig.core.counters.step_tokens
        rig.turn()
        assert quiet.finished
        assert rig.core.counters.step_tokens - before == 16, "the next step is full again"


@pytest.mark.parametrize("pause_s, due", [(0.0, 96), (0.05, 50), (0.2, 0)])
def test_what_a_tenant_computed_alone_counts_less_after_a_rest(pause_s: float, due: int) -> None:
    """The rig computes a token in a millisecond: who ran 96 ahead and then left it idle for 50 ms
    kept nobody from 50 of them."""
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    rig.submit(prompt(96, 1), 1, origin=QUIET)
    rig.turn(6)
    assert rig.core.scheduler.idle
    rig.runner.now_s += pause_s
    rig.submit(prompt(300, 2), 1, origin=LOUD)
    rig.submit(prompt(300, 3), 1, origin=QUIET)
    fairness = rig.core.scheduler.fairness
    loud, quiet = fairness.account(LOUD.tenant), fairness.account(QUIET.tenant)
    ahead = 0
    while quiet.prompt_tokens_computed == 96:
        rig.turn()
        ahead = loud.prompt_tokens_computed
    assert abs(ahead - due) <= 16


def test_hours_after_an_abort_are_a_rest_as_well() -> None:
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    left = rig.submit(prompt(96, 1), 100, origin=QUIET)
    rig.turn(7)
    left.abort()
    rig.turn()
    assert rig.core.scheduler.idle
    rig.runner.now_s += 3600
    rig.submit(prompt(300, 2), 1, origin=LOUD)
    rig.submit(prompt(300, 3), 1, origin=QUIET)
    rig.turn(3)
    quiet = rig.core.scheduler.fairness.account(QUIET.tenant)
    assert quiet.prompt_tokens_computed > 96, "it has its turn among the first"


def test_steps_are_full_when_nobody_is_owed_anything() -> None:
    """Short prompts of many who ask as much as each other share their steps."""
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32, force_miss=True)
    for i in range(64):
        rig.submit(prompt(5, i), 1, origin=Origin(tenant=f"t{i % 4}"))
    before = rig.core.counters.step_tokens
    rig.turn(20)
    assert rig.core.counters.step_tokens - before == 64 * 5


def test_one_who_then_asks_all_the_time_is_ahead_by_a_burst_at_the_most() -> None:
    rig = Rig(num_blocks=1024, max_batch_tokens=16, max_num_seqs=32)
    fairness = rig.core.scheduler.fairness
    fairness.burst = 64
    for i in range(8):
        rig.submit(prompt(300, i), 1, origin=LOUD)
    rig.turn(30)
    loud, quiet = fairness.account(LOUD.tenant), fairness.account(QUIET.tenant)
    before = loud.prompt_tokens_computed
    for i in range(8):
        rig.submit(prompt(300, 50 + i), 1, origin=QUIET)
    ahead = []
    for _ in range(60):
        rig.turn()
        ahead.append(quiet.prompt_tokens_computed - (loud.prompt_tokens_computed - before))
    assert 64 <= max(ahead) <= 64 + 16 and min(ahead[10:]) > 0


def test_a_tenant_that_was_away_has_saved_up_no_more_than_a_quantum() -> None:
    rig = Rig(num_blocks=512, max_batch_tokens=32, max_num_seqs=4)
    a, b = Load(rig, Origin(tenant="a"), 6, 1), Load(rig, Origin(tenant="b"), 6, 2)
    rig.submit(prompt(3, 1), 1, origin=Origin(tenant="back"))
    for _ in range(200):
        for load in (a, b):
            load.feed()
        rig.turn()
    back = Load(rig, Origin(tenant="back"), 6, 3)
    start = [load.account.cost for load in (a, b, back)]
    for _ in range(100):
        for load in (a, b, back):
            load.feed()
        rig.turn()
    had = [load.account.cost - old for load, old in zip((a, b, back), start, strict=True)]
    assert had[2] - min(had[:2]) <= 32 + 20 + 4 * 8 + 4 * 8


def test_what_a_tenant_had_while_nobody_waited_is_not_held_against_it() -> None:
    rig = Rig(num_blocks=512, max_batch_tokens=32, max_num_seqs=4)
    alone = Load(rig, Origin(tenant="a"), 1, 1)
    for _ in range(300):
        if not rig.core.scheduler.running:
            alone.feed()
        rig.turn()
    assert alone.account.cost > 800
    alone.depth, other = 6, Load(rig, Origin(tenant="b"), 6, 2)
    start = alone.account.cost
    for _ in range(120):
        for load in (alone, other):
            load.feed()
        rig.turn()
    assert other.account.cost - (alone.account.cost - start) <= 32 + 32 + 20 + 8 * 8


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 20))
def test_a_cold_request_among_nine_times_as_much_hot_traffic_starts_within_bounded_steps(
    seed: int, places: int, length: int
) -> None:
    """SCHED-2: MAX_SKIPS others go ahead, and each step in which none ends is one in which those
    that run come nearer to their end."""
    rig = Rig(num_blocks=256, max_batch_tokens=32, max_num_seqs=places)
    rig.submit(prompt(20, 1), 1)
    rig.run()
    rng, hot = random.Random(seed), list[Stream]()

    def feed() -> None:
        while sum(stream.admitted_s is None for stream in hot) < 9:
            hot.append(rig.submit([*prompt(20, 1), rng.randrange(3, 64)], rng.randint(1, 4)))

    feed()
    rig.turn()
    feed()
    cold = rig.submit(prompt(length, 2), 1)
    before = sum(stream.admitted_s is not None for stream in hot)
    older = len(hot) - before
    turns = 0
    while cold.admitted_s is None:
        feed()
        rig.turn()
        turns += 1
    ahead = sum((s.admitted_s or cold.admitted_s) < cold.admitted_s for s in hot) - before
    assert ahead <= older + MAX_SKIPS
    assert turns <= (older + MAX_SKIPS) * 5 // places + 5


def test_a_tenant_without_room_for_its_turn_is_passed_a_bounded_number_of_times() -> None:
    """Across tenants as inside one: small requests of others do not starve a large one."""
    rig = Rig(num_blocks=32, max_num_seqs=40, max_batch_tokens=400)
    rig.submit(prompt(20, 1), 60, origin=Origin(tenant="a"))
    rig.turn()
    large = rig.submit(prompt(110, 2), 4, origin=QUIET)
    small = [rig.submit(prompt(2, 100 + i), 1, origin=LOUD) for i in range(40)]
    rig.run()
    assert large.admitted_s is not None
    ahead = [stream for stream in small if (stream.admitted_s or 0.0) < large.admitted_s]
    assert len(ahead) == MAX_PASSES


def test_the_more_urgent_goes_first_inside_its_tenant_and_starves_nobody() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(prompt(5, 1), 3)
    rig.turn()
    later = rig.submit(prompt(5, 2), 1, origin=Origin(priority=1))
    urgent = [rig.submit(prompt(5, 10 + i), 1, origin=Origin(priority=-1)) for i in range(40)]
    rig.run()
    assert later.admitted_s is not None
    ahead = [stream for stream in urgent if (stream.admitted_s or 0.0) < later.admitted_s]
    assert len(ahead) == MAX_SKIPS


def test_urgency_counts_for_nothing_against_another_tenant() -> None:
    rig = Rig(max_num_seqs=1, max_batch_tokens=8)
    running = rig.submit(prompt(5, 1), 3, origin=LOUD)
    rig.turn()
    urgent = Origin(tenant="loud", priority=-100)
    others = [rig.submit(prompt(5, 10 + i), 4, origin=urgent) for i in range(20)]
    quiet = rig.submit(prompt(5, 2), 1, origin=QUIET)
    rig.run()
    assert running.finished and quiet.admitted_s is not None
    assert sum((stream.admitted_s or 0.0) < quiet.admitted_s for stream in others) <= 1


def test_batch_work_starts_only_when_nobody_waits_for_an_answer() -> None:
    rig = Rig(max_num_seqs=2, max_batch_tokens=16)
    batch = [rig.submit(prompt(6, i), 3, origin=Origin(batch=True)) for i in range(4)]
    live = [rig.submit(prompt(6, 10 + i), 3, origin=QUIET) for i in range(6)]
    rig.run()
    assert max(s.admitted_s or 0.0 for s in live) <= min(s.admitted_s or 0.0 for s in batch)
    for i, stream in enumerate(batch):
        assert ids_of(stream) == [greedy(prompt(6, i), 3)]


def test_batch_work_leaves_places_and_blocks_for_those_who_come_later() -> None:
    rig = Rig(num_blocks=64, max_num_seqs=8, batch_share=0.5)
    for i in range(20):
        rig.submit(prompt(12, i), 40, origin=Origin(batch=True))
    rig.turn(6)
    account = rig.core.scheduler.fairness.account("local", batch=True)
    assert 1 <= account.num_running <= 4
    assert rig.cache.stats().used_blocks <= 32
    live = [rig.submit(prompt(12, 100 + i), 2, origin=QUIET) for i in range(4)]
    rig.turn()
    assert all(stream.admitted_s is not None for stream in live)


def test_batch_work_beyond_its_share_yields_to_whoever_waits_for_an_answer() -> None:
    """It may run alone with more than its share; then it is preempted, and ends all the same."""
    rig = Rig(num_blocks=16, max_num_seqs=8, batch_share=0.25)
    batch = rig.submit(prompt(40, 1), 20, origin=Origin(batch=True))
    rig.turn(3)
    live = rig.submit(prompt(30, 2), 2, origin=QUIET)
    rig.turn()
    assert live.admitted_s is not None
    rig.run()
    assert rig.core.counters.preemptions > 0
    assert ids_of(batch) == [greedy(prompt(40, 1), 20)]
    assert ids_of(live) == [greedy(prompt(30, 2), 2)]


def test_a_tenant_runs_no_more_at_once_than_it_may() -> None:
    rig = Rig(max_num_seqs=8)
    rig.core.set_tenant("loud", TenantShare(max_running=2))
    for i in range(6):
        rig.submit(prompt(5, i), 5, n=2 if i == 3 else 1, seed=i, origin=LOUD)
    other = rig.submit(prompt(5, 9), 2, origin=QUIET)
    account = rig.core.scheduler.fairness.account("loud")
    rig.turn()
    assert other.admitted_s is not None
    while not rig.core.scheduler.idle:
        assert account.places <= 2
        rig.turn()


def test_a_request_with_more_choices_than_its_tenant_may_run_runs_by_itself() -> None:
    rig = Rig(max_num_seqs=8)
    rig.core.set_tenant("loud", TenantShare(max_running=2))
    stream = rig.submit(prompt(5, 1), 3, n=4, seed=1, origin=LOUD)
    rig.run()
    assert len(ids_of(stream)) == 4


def test_each_tenant_is_counted_by_itself_and_the_sums_are_the_engines() -> None:
    """SECURITY: what one tenant is told of itself has nothing of another's in it."""
    rig = Rig(num_blocks=24, max_num_seqs=6, max_batch_tokens=16)
    for i in range(12):
        origin = Origin(tenant="ab"[i % 2], batch=i % 3 == 0)
        rig.submit(prompt(9, i % 5), 12, origin=origin)
    rig.turn(4)
    middle = rig.core.stats
    assert sum(t.num_running for t in middle.by_tenant.values()) == middle.num_running
    assert sum(t.num_waiting for t in middle.by_tenant.values()) == middle.num_waiting > 0
    rig.run()
    stats, parts = rig.core.stats, rig.core.stats.by_tenant
    assert set(parts) == {"a", "b"}
    assert middle.by_tenant["a"].generation_tokens_total < parts["a"].generation_tokens_total
    for name in (
        "requests_total",
        "rejected_total",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "prompt_tokens_found_later_total",
        "prompt_tokens_computed_total",
        "recomputed_tokens_total",
        "generation_tokens_total",
        "preemptions_total",
    ):
        assert sum(getattr(part, name) for part in parts.values()) == getattr(stats, name), name
    assert stats.preemptions_total > 0
    alone = Rig()
    for i in range(12):
        if i % 2:
            alone.submit(prompt(9, i % 5), 12, origin=Origin(tenant="b", batch=i % 3 == 0))
    alone.run()
    assert alone.core.stats.by_tenant["b"].prompt_tokens_total == parts["b"].prompt_tokens_total


def test_no_more_is_looked_up_in_a_step_than_the_window_whoever_waits() -> None:
    """A queue of thousands costs a step no more than one of a hundred."""
    rig = Rig(num_blocks=512, max_num_seqs=1, max_batch_tokens=8)
    rig.submit(prompt(5, 1), 300)
    rig.turn()
    lookups = 0
    real = rig.cache.lookup

    def counting(*args: object, **kwargs: object) -> int:
        nonlocal lookups
        lookups += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    rig.cache.lookup = counting  # type: ignore[method-assign]
    for i in range(600):
        rig.submit(prompt(4, i), 1, origin=Origin(tenant=f"t{i % 300}"))
    rig.core.scheduler.live.max_num_seqs = 2
    rig.core.turn()
    assert 0 < lookups <= 128


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0}, {"weight": -1.0}, {"weight": float("nan")}, {"max_running": 0}]
    + [{"max_waiting": -1}, {"max_running": True}, {"weight": "2"}],
)
def test_a_share_that_means_nothing_is_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidConfig, match=f"{name} is"):
        TenantShare(**wrong)  # type: ignore[arg-type]


def test_a_new_weight_does_not_change_what_was_charged() -> None:
    fairness = Fairness(quantum=10)
    account = fairness.account("a")
    account.generation_tokens = 30
    fairness.changed.add(account)
    fairness.settle(lambda _: True)
    fairness.set_share("a", TenantShare(weight=3.0))
    fairness.settle(lambda _: True)
    assert account.level == 30.0
    account.generation_tokens = 60
    fairness.settle(lambda _: True)
    assert account.level == 40.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model, tokenizer = tiny_models.build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny-llama")
    with Engine(loaded, kv_memory="1MiB", max_num_seqs=4) as engine:
        yield engine


def test_a_tenant_whose_queue_is_full_is_told_so_and_others_are_not(engine: Engine) -> None:
    engine.set_tenant_share("loud", TenantShare(max_running=1, max_waiting=1))
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    streams = [engine.submit([5, 6, i + 3], params, origin=LOUD) for i in range(2)]
    with pytest.raises(Overloaded, match="max_running 1 and max_waiting 1") as caught:
        engine.submit([5, 6, 7], params, origin=LOUD)
    assert caught.value.status == 429 and caught.value.retry_after_s >= 1
    other = engine.submit([5, 6, 7], SamplingParams(max_tokens=2), origin=QUIET)
    other.result()
    assert [len(stream.result().token_ids) for stream in streams] == [300, 300]
    engine.submit([5, 6, 7], SamplingParams(max_tokens=1), origin=LOUD).result()
    parts = engine.stats().by_tenant
    assert parts["quiet"].requests_total == 1
    assert {name: part.rejected_total for name, part in parts.items()} == {"loud": 1, "quiet": 0}
    assert parts["loud"].requests_total == 3 and engine.stats().rejected_total == 1
    assert engine.check() == []
