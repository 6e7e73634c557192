"""How long blocks live: known from samples, in seconds, within bounds; what is unknown is None."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.residency import SERIES
from radixkv.sketch import Marks, Sketch
from radixkv.tokens import encode
from tests.cache_runs import Clock, flood, fresh, identity, run

ME = identity("me")


def test_a_quantile_is_within_five_percent() -> None:
    rng = random.Random(1)
    durations = [rng.lognormvariate(3, 3) for _ in range(5000)]
    sketch = Sketch()
    for seconds in durations:
        sketch.add(seconds)
    assert sketch.count == 5000 and sketch.sum == pytest.approx(sum(durations), rel=1e-3)
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(durations, q, method="lower"))
        assert sketch.quantile(q) == pytest.approx(exact, rel=0.051)
    for bound, n in zip((0.1, 10.0, 1e4), sketch.cumulative((0.1, 10.0, 1e4)), strict=True):
        assert sum(x <= bound / 1.11 for x in durations) <= n
        assert n <= sum(x <= bound * 1.11 for x in durations)
    assert len(sketch._counts) < 300


def test_of_nothing_there_is_no_quantile() -> None:
    sketch = Sketch()
    assert sketch.quantile(0.5) is None and sketch.cumulative((1.0, 2.0)) == (0, 0)
    sketch.add(0.0, 3)
    assert sketch.quantile(0.5) == 0.0 and sketch.cumulative((0.0, 1.0)) == (3, 3)
    sketch.add(1e30)
    assert sketch.quantile(1.0) == pytest.approx(1e9, rel=0.06)
    with pytest.raises(ValueError, match="1.5"):
        sketch.quantile(1.5)


def test_marks_tell_when_within_ten_milliseconds_or_five_percent() -> None:
    rng = random.Random(2)
    marks, truth, now = Marks(), [], 0.0
    for count in range(20_000):
        now += rng.choice([0.0, 0.001, 0.02, 1.0]) if rng.random() < 0.999 else 5000.0
        truth.append(now)
        marks.note(count, now)
    assert len(marks._counts) <= 512
    for count in [*range(0, 20_000, 37), 19_999]:
        when = marks.when(count, now)
        if when is not None:
            assert -0.011 <= when - truth[count] <= 1e-9 + 0.11 * (now - truth[count])
    assert marks.when(0, now) is not None and marks.when(-1, now) is None
    assert marks.when(20_000, now + 7) == now + 7  # nobody has told yet
    assert Marks().when(5, 1.0) is None


def test_what_happens_between_two_marks_counts_as_of_the_later_one() -> None:
    """However long nobody looked: what was let go just now is not as old as the mark before."""
    marks = Marks()
    marks.note(1, 0.0)
    marks.note(4, 0.005)  # as good as at once
    marks.note(9, 3600.0)
    assert [marks.when(count, 4000.0) for count in (0, 1, 4, 5, 9)] == [None, 0, 0, 3600, 3600]


def test_the_life_of_blocks_is_told_in_seconds() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    assert cache.residency.quantiles()["lifetime"] == {0.5: None, 0.9: None, 0.99: None}
    # Each block is published, used again 30 s later, and goes when 64 more have come: 640 s.
    texts: list[list[int]] = []
    for i in range(3000):
        texts.append(fresh(4))
        run(cache, ME, texts[-1])
        if i >= 3:
            run(cache, ME, texts[-4])
        clock.sleep(10)
    told = cache.residency.quantiles()
    assert told["lifetime"][0.5] == pytest.approx(640, rel=0.1)
    assert told["idle"][0.5] == pytest.approx(610, rel=0.1)
    assert told["reuse_gap"][0.5] == pytest.approx(30, rel=0.1)
    # Of one acquire in 64 it is known when its block was published, and then each is met again.
    assert cache.residency.lifetime.count > 6000 / 64 / 2


@pytest.mark.parametrize("num_blocks", [1, 6, 40])
def test_a_life_that_is_known_ends_unseen_by_no_eviction(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Few blocks or many at once, a whole edge or its end: what was published is seen going."""
    monkeypatch.setattr("radixkv.residency._FINDS_BITS", 0)  # look at every acquire
    clock = Clock()
    cache = PrefixCache(120, 4, clock=clock)
    for _ in range(50):
        run(cache, ME, fresh(4 * num_blocks))
        clock.sleep(1)
    told = cache.residency
    assert len(told._births) + told.lifetime.count / num_blocks == pytest.approx(50, abs=1)
    if num_blocks > 1:
        assert told.lifetime.quantile(0.5) == pytest.approx(120 // num_blocks, abs=2)
    held = {*np.flatnonzero(told._is_tracked).tolist()}
    assert held == {*told._births}


def test_idle_time_that_nothing_happened_in_counts() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    run(cache, ME, fresh(32))
    clock.sleep(1000)
    for _ in range(20):
        flood(cache, ME, 8)
    assert cache.residency.idle.quantile(1.0) == pytest.approx(1000, rel=0.06)


def test_what_is_in_use_is_reused_at_once() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    text = fresh(16)
    run(cache, ME, text)
    clock.sleep(100)
    with cache.acquire(ME, encode(text)):
        clock.sleep(50)
        for _ in range(1000):
            cache.acquire(ME, encode(text)).release()
    assert cache.residency.reuse_gap.count > 5
    assert cache.residency.reuse_gap.quantile(0.8) == 0.0


def test_a_prefix_that_many_share_was_used_when_any_of_them_was() -> None:
    clock = Clock()
    cache = PrefixCache(600, 4, clock=clock)
    stem = fresh(8)
    for _ in range(200):
        run(cache, ME, [*stem, *fresh(4)])
        clock.sleep(3)
    assert cache.residency.reuse_gap.quantile(0.9) == pytest.approx(3, rel=0.06)


def test_batch_work_is_timed_too() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    for _ in range(600):
        flood(cache, ME, 1, batch=True)
        clock.sleep(10)
    assert cache.residency.idle.quantile(0.5) == pytest.approx(640, rel=0.1)


def test_a_block_that_came_to_hold_others_has_not_lived_through_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tail that is replaced, a block that is cleared: its birth is not that of what follows."""
    monkeypatch.setattr("radixkv.residency._FINDS_BITS", 0)  # look at every acquire
    clock = Clock()
    cache = PrefixCache(16, 4, clock=clock)
    run(cache, ME, fresh(64))
    clock.sleep(10_000)
    cache.reset()
    for _ in range(500):
        run(cache, ME, fresh(6))
        clock.sleep(1)
    longest = cache.residency.lifetime.quantile(1.0)
    assert longest is not None and longest < 20
    assert cache.residency.lifetime.count > 100


def test_histograms_are_cumulative_and_named() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    for _ in range(300):
        flood(cache, ME, 1)
        clock.sleep(10)
    for name in SERIES:
        told = cache.residency.histogram(name)
        assert [*told.counts] == sorted(told.counts) and told.counts[-1] <= told.count
        assert len(told.counts) == len(told.bounds_s)
    idle = cache.residency.histogram("idle")
    assert idle.counts[idle.bounds_s.index(60.0)] == 0
    assert idle.counts[idle.bounds_s.index(300.0)] == idle.count > 0
    with pytest.raises(ValueError, match="lifetime, idle, reuse_gap"):
        cache.residency.histogram("life")
    cache.clear_counters()
    assert cache.residency.idle.count == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.residency._FINDS_BITS", 0)  # look at every acquire
    cache = PrefixCache(4096, 1)
    who = identity("me", block_size=1)
    for _ in range(1200):
        run(cache, who, fresh(3))
    assert len(cache.residency._births) == cache.residency._is_tracked.sum() == 1024
