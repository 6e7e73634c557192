"""Counts over time: windows, denominators, bounded memory, and nobody else's rows."""

from __future__ import annotations

from typing import get_args

import pytest

from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine import history as module
from radixkv.service.engine.history import MAX_KEYS, MAX_TENANTS, OTHER, History
from tests.fake_model import Rig


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


ONE = CacheIdentity.local("one")


def test_a_window_holds_what_was_counted_in_it_and_says_how_long_it_is(clock: Clock) -> None:
    """METRICS-5: the interval and the denominator are stated."""
    history = History(clock)
    history.add("a", ONE, None, requests=1, queried_tokens=100, hit_tokens=0)
    clock.now_s += 100
    history.add("a", ONE, None, requests=1, queried_tokens=100, hit_tokens=90)
    clock.now_s += 5
    short, long = history.read(10), history.read(300)
    assert short.rows[0].counts["queried_tokens"] == 100
    assert short.rows[0].hit_rate == 0.9
    assert long.rows[0].counts["queried_tokens"] == 200
    assert long.rows[0].hit_rate == 0.45
    assert (short.start_s, short.end_s, short.slot_s) == (1096.0, 1105.25, 1)
    assert long.start_s == 1000.25, "no earlier than we began"


def test_the_rate_of_nothing_is_unknown(clock: Clock) -> None:
    """METRICS-6: missing data is None, not 0."""
    history = History(clock)
    history.add("a", ONE, None, queried_tokens=10)
    clock.now_s += 50
    (row,) = history.read(10).rows
    assert row.counts["queried_tokens"] == 0
    assert row.hit_rate is None


def test_what_a_recomputation_costs_is_in_no_rate(clock: Clock) -> None:
    """METRICS-2."""
    history = History(clock)
    history.add("a", ONE, None, requests=1, queried_tokens=100)
    history.add("a", ONE, None, computed_tokens=100)
    history.add("a", ONE, None, preemptions=1)
    history.add("a", ONE, None, recomputed_tokens=60)
    (row,) = history.read(60).rows
    assert row.hit_rate == 0
    assert row.counts["recomputed_tokens"] == 60
    assert row.counts["computed_tokens"] == 100


def test_what_comes_back_from_host_memory_is_counted_and_in_no_rate() -> None:
    """METRICS-2: neither hit nor computed; a crowd of four of which some are swapped out and in."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=2**20)
    for seed in range(4):
        rig.submit([3 + (7 * i + 11 * seed) % 60 for i in range(10)], 30)
    rig.run()
    counters = rig.core.counters
    (row,) = counters.observer.history.read(60).rows
    assert row.counts["restored_tokens"] == counters.swapped_in_tokens > 0
    assert (row.counts["hit_tokens"], row.counts["computed_tokens"]) == (0, 40)
    assert row.counts["recomputed_tokens"] == 0


def test_evictions_are_known_by_tenant_and_by_nothing_finer(clock: Clock) -> None:
    history = History(clock)
    history.add("a", ONE, "label", requests=1, queried_tokens=10)
    history.add_blocks("a", suffered=3, caused=1)
    (row,) = history.read(60).rows
    assert row.counts["evicted_suffered_blocks"] == 3
    assert row.counts["evicted_caused_blocks"] == 1
    (row,) = history.read(60, "prompt_cache_key").rows
    assert "evicted_suffered_blocks" not in row.counts


def test_hours_are_kept_by_the_minute(clock: Clock) -> None:
    history = History(clock)
    for _ in range(180):
        history.add("a", ONE, None, queried_tokens=1)
        clock.now_s += 60
    window = history.read(3600)
    assert window.slot_s == 60
    assert window.rows[0].counts["queried_tokens"] == 59, "59 whole minutes and the running one"
    assert 3540 <= window.end_s - window.start_s <= 3600
    assert history.read(3 * 3600).rows[0].counts["queried_tokens"] in (179, 180)


def test_a_caller_sees_only_the_tenants_named(clock: Clock) -> None:
    """SECURITY-5."""
    history = History(clock)
    two = CacheIdentity.local("two")
    history.add("a", ONE, "label", queried_tokens=1)
    history.add("b", two, "secret label", queried_tokens=2)
    for by in get_args(module.By):
        rows = history.read(60, by, {"a"}).rows
        assert [(row.tenant, row.counts["queried_tokens"]) for row in rows] == [("a", 1)]
    assert {row.tenant for row in history.read(60).rows} == {"a", "b"}
    assert {row.key for row in history.read(60, "identity").rows} == {ONE, two}


def test_labels_without_end_take_bounded_memory_and_no_other_tenants_room(clock: Clock) -> None:
    history = History(clock)
    for i in range(3 * MAX_KEYS):
        history.add("loud", ONE, f"label {i}", queried_tokens=1)
    history.add("quiet", ONE, "mine", queried_tokens=7)
    rows = history.read(60, "prompt_cache_key").rows
    loud = [row for row in rows if row.tenant == "loud"]
    assert len(loud) == MAX_KEYS + 1
    assert sum(row.counts["queried_tokens"] for row in loud) == 3 * MAX_KEYS, "nothing is lost"
    assert next(row for row in loud if row.key is OTHER).counts["queried_tokens"] == 2 * MAX_KEYS
    assert [row.key for row in rows if row.tenant == "quiet"] == ["mine"]
    for i in range(2 * MAX_TENANTS):
        history.add(f"t{i}", ONE, None, queried_tokens=1)
    assert len(history.read(60).rows) == MAX_TENANTS + 1
    assert OTHER not in {row.tenant for row in history.read(60, tenants={"loud"}).rows}


def test_a_silent_label_makes_room_for_a_new_one(clock: Clock) -> None:
    history = History(clock)
    for i in range(MAX_KEYS):
        history.add("a", ONE, f"old {i}", queried_tokens=1)
    clock.now_s += module.MAX_WINDOW_S + 200
    history.add("a", ONE, "new", queried_tokens=1)
    assert [row.key for row in history.read(60, "prompt_cache_key").rows] == ["new"]


def test_slots_are_bounded(clock: Clock) -> None:
    history = History(clock)
    for _ in range(3 * module.SECOND_SLOTS):
        history.add("a", ONE, None, queried_tokens=1)
        clock.now_s += 1
    series = history._tenants["a"].total
    assert len(series.seconds._slots) <= module.SECOND_SLOTS
    assert history.read(300).rows[0].counts["queried_tokens"] == 299


@pytest.mark.parametrize("window_s", [0, -1, module.MAX_WINDOW_S + 1])
def test_a_window_that_is_not_kept_is_refused(clock: Clock, window_s: float) -> None:
    with pytest.raises(ValueError, match="wanted 1 to"):
        History(clock).read(window_s)
