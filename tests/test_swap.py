"""Preemption by swap: exact, bounded, chosen by what was measured, and it leaks nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import Engine
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.lookups import MAX_LOOKUPS
from radixkv.service.engine.rates import Rate
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.stream import Stream
from radixkv.service.engine.swap import HostPool
from tests import tiny_models
from tests.fake_model import Rig, greedy, ids_of

ENOUGH = 2**20


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


def saved(rig: Rig) -> list[Sequence]:
    return [seq for seq in rig.core.scheduler.waiting if seq.saved is not None]


def until_saved(rig: Rig) -> Sequence:
    """Turn until a preempted sequence lies in host memory."""
    for _ in range(200):
        rig.turn()
        if saved(rig):
            return saved(rig)[0]
    raise AssertionError("nothing was swapped out")


def crowded(rig: Rig, num: int = 4) -> list[Stream]:
    return [rig.submit(prompt(10, i), 30) for i in range(num)]


def test_what_was_swapped_out_is_not_computed_again_and_answers_are_the_same() -> None:
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    streams = crowded(rig)
    rig.run()
    counters = rig.core.counters
    assert counters.preemptions_by_swap == counters.preemptions > 0
    assert counters.swapped_in_tokens > 0
    assert counters.recomputed_tokens == 0
    assert rig.runner.tokens_computed == 4 * (10 + 29)
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(prompt(10, i), 30)]


def test_a_swapped_in_token_is_neither_a_hit_nor_recomputed() -> None:
    """METRICS-2, METRICS-3 and USAGE-3."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    streams = crowded(rig)
    rig.turn()
    shown = [rig.core.stats]
    while not rig.core.scheduler.idle:
        rig.turn()
        shown.append(rig.core.stats)
    stats = shown[-1]
    assert [stream.usage.cached_tokens for stream in streams] == [0] * 4
    assert stats.cache.hit_tokens == 0 and stats.cache.queried_tokens == 40
    assert stats.prompt_tokens_computed_total == stats.prompt_tokens_total == 40
    assert stats.recomputed_tokens_total == stats.prompt_tokens_cached_total == 0
    assert stats.preemptions == {"swap": stats.preemptions_total, "recompute": 0}
    assert stats.swapped_out_tokens_total >= stats.swapped_in_tokens_total > 0
    assert stats.swapped_in_bytes_total % rig.runner.block_bytes == 0
    assert max(s.swap_used_bytes for s in shown) > 0 and stats.swap_used_bytes == 0
    for name in ("swapped_out_tokens_total", "swapped_in_bytes_total", "preemptions_total"):
        values = [getattr(s, name) for s in shown]
        assert values == sorted(values), name


@pytest.mark.parametrize(("copy_s", "swaps"), [(1e-6, True), (1.0, False)])
def test_the_cheaper_way_is_taken_by_what_was_measured(copy_s: float, swaps: bool) -> None:
    """The first time it is tried, since nothing is known yet; then what it took decides."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    rig.runner.copy_s = copy_s
    streams = crowded(rig, 8)
    rig.run()
    counters = rig.core.counters
    assert counters.preemptions > 4
    assert counters.preemptions_by_swap == (counters.preemptions if swaps else 1)
    assert (counters.recomputed_tokens > 0) is not swaps
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(prompt(10, i), 30)]


def test_a_rate_is_that_of_late() -> None:
    rate = Rate()
    assert rate.seconds(1.0) is None
    rate.note(100.0, 1.0)
    assert rate.seconds(50.0) == pytest.approx(0.5)
    for _ in range(50):
        rate.note(100.0, 10.0)
    assert rate.seconds(50.0) == pytest.approx(5.0, rel=1e-3)


def test_what_others_hold_is_not_copied() -> None:
    """Only what the preempted sequence alone holds would be lost: not the prefix that is in use."""
    rig = Rig(num_blocks=20, max_num_seqs=4, swap_memory=ENOUGH)
    shared = prompt(40, 1)
    rig.submit(shared, 1)
    rig.run()
    streams = [rig.submit([*shared, 5 + i], 24) for i in range(2)]
    seq = until_saved(rig)
    assert seq.saved is not None
    assert seq.saved.first_block == 10
    assert seq.saved.num_bytes == (-(-seq.saved.num_tokens // 4) - 10) * rig.runner.block_bytes
    rig.run()
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy([*shared, 5 + i], 24)]


def test_what_is_still_resident_is_not_copied_back() -> None:
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    streams = crowded(rig, 3)
    seq = until_saved(rig)
    others = [s for s in streams if s is not seq.request.stream]
    for stream in others:
        stream.abort()
    rig.turn()
    rig.run()
    # One block, at most, was taken before the others went away.
    assert rig.core.counters.swapped_in_tokens <= 4
    assert rig.core.counters.recomputed_tokens == 0


def test_what_was_lost_before_the_saved_part_is_computed_and_the_saved_part_copied() -> None:
    """The shared prefix was held by another when it was saved, and evicted afterwards."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    shared = prompt(16, 1)
    first = rig.submit(shared, 12)
    rig.turn(2)
    second = rig.submit([*shared, 7], 26)
    third = rig.submit(prompt(9, 5), 24)
    seq = until_saved(rig)
    while saved(rig) and not rig.core.scheduler.idle:
        first.abort()
        rig.turn()
    rig.run()
    assert seq.saved is None
    assert ids_of(second) == [greedy([*shared, 7], 26)]
    assert ids_of(third) == [greedy(prompt(9, 5), 24)]


def test_the_host_pool_is_bounded_and_what_does_not_fit_is_computed_again() -> None:
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=5 * 4 * 8)
    streams = crowded(rig, 6)
    rig.turn()
    most = 0
    while not rig.core.scheduler.idle:
        rig.turn()
        assert rig.core.swapper is not None
        most = max(most, rig.core.swapper.pool.used_bytes)
    assert 0 < most <= 5 * 4 * 8
    assert 0 < rig.core.counters.preemptions_by_swap < rig.core.counters.preemptions
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(prompt(10, i), 30)]


def test_a_host_pool_gives_what_it_took_and_no_more() -> None:
    pool = HostPool(10)
    assert pool.take(7) and not pool.take(4) and pool.take(3)
    pool.give(10)
    assert pool.used_bytes == 0
    with pytest.raises(AssertionError):
        pool.give(1)


def test_an_abort_while_swapped_out_gives_the_host_memory_back() -> None:
    """LEAK-1."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    streams = crowded(rig)
    seq = until_saved(rig)
    assert rig.core.stats.swap_used_bytes > 0
    seq.request.stream.abort()
    rig.turn()
    assert seq.saved is None
    others = sum(s.saved.num_bytes for s in saved(rig) if s.saved is not None)
    assert rig.core.stats.swap_used_bytes == others
    for stream in streams:
        stream.abort()
    rig.run()
    assert rig.core.stats.swap_used_bytes == 0


def test_new_weights_make_what_is_swapped_out_worthless() -> None:
    """ADMIN-1: what starts under another identity reads no KV of the old one, from any tier."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    crowded(rig)
    seq = until_saved(rig)
    rig.core.weights_changed()
    assert seq.saved is None
    rig.run()


def test_each_lookup_of_a_request_is_traced_and_usage_reports_the_first() -> None:
    """DIAG-1 and USAGE-3: identity, tokens, tier and why it stopped, in order."""
    rig = Rig(num_blocks=14, max_num_seqs=4, swap_memory=ENOUGH)
    rig.submit(prompt(10, 3)[:6], 1)
    rig.run()
    streams = crowded(rig)
    rig.run()
    preempted = [stream for stream in streams if len(stream.lookups) > 1]
    assert preempted
    for stream in streams:
        first, *later = stream.lookups
        assert first.matched_tokens == stream.usage.cached_tokens
        assert first.queried_tokens == 10
        assert first.tier == ("device" if stream is streams[3] else "none")
        assert first.stopped == "not_resident" and not first.resumed
        assert len(first.identity_digest) == 32
        for lookup in later:
            assert lookup.resumed and lookup.identity == first.identity
            assert lookup.queried_tokens > 10
            assert lookup.matched_tokens == lookup.device_tokens + lookup.host_tokens
            assert lookup.matched_tokens == lookup.queried_tokens - 1
            assert lookup.stopped in ("last_token", "host")
    assert any("host" in lookup.tier for stream in preempted for lookup in stream.lookups)


def test_a_full_hit_says_that_the_last_token_is_left_and_a_cache_that_is_off_says_so() -> None:
    rig, off = Rig(), Rig(enabled=False)
    for _ in range(2):
        warm, cold = rig.submit(prompt(9, 1), 1), off.submit(prompt(9, 1), 1)
        rig.run()
        off.run()
    assert [(x.device_tokens, x.stopped, x.tier) for x in warm.lookups] == [
        (8, "last_token", "device")
    ]
    assert [(x.device_tokens, x.stopped, x.tier) for x in cold.lookups] == [(0, "off", "none")]


def test_a_trace_is_bounded_and_keeps_the_first() -> None:
    rig = Rig(num_blocks=10, max_num_seqs=6)
    streams = [rig.submit(prompt(6, i), 30) for i in range(6)]
    rig.run()
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(prompt(6, i), 30)]
        assert len(stream.lookups) <= MAX_LOOKUPS
        assert not stream.lookups[0].resumed
        assert all(lookup.resumed for lookup in stream.lookups[1:])


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 2),  # which shared beginning
            st.integers(1, 14),  # how much of it
            st.integers(1, 14),  # max_tokens
            st.integers(1, 3),  # n
            st.integers(0, 5),  # turns before the next request
            st.integers(-6, 9),  # abort after so many turns, if positive
        ),
        min_size=3,
        max_size=10,
    ),
    block_size=st.sampled_from([1, 2, 3, 4]),
    num_tokens=st.integers(40, 90),
    budget=st.integers(3, 30),
    swap_blocks=st.integers(1, 60),
)
def test_any_schedule_with_swapping_gives_the_answers_of_requests_run_alone(
    requests: list[tuple[int, int, int, int, int, int]],
    block_size: int,
    num_tokens: int,
    budget: int,
    swap_blocks: int,
) -> None:
    """CORRECT-1 and LEAK-1, with the fake model, which checks each entry that it reads."""
    rig = Rig(
        num_blocks=max(num_tokens // block_size, 30 // block_size + 3 * (14 // block_size + 2)),
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=5,
        swap_memory=swap_blocks * block_size * 8,
    )
    sent: list[tuple[Stream, list[int], int, int]] = []
    doomed: list[tuple[int, Stream]] = []
    clock = 0
    for i, (start, length, max_tokens, n, pause, abort) in enumerate(requests):
        tokens = prompt(14, start)[:length]
        stream = rig.submit(tokens, max_tokens, n=n, seed=i)
        sent.append((stream, tokens, max_tokens, n))
        if abort > 0:
            doomed.append((clock + abort, stream))
        for _ in range(pause):
            for when, stream in doomed:
                if when == clock:
                    stream.abort()
            rig.turn()
            clock += 1
    rig.run()
    for i, (stream, tokens, max_tokens, n) in enumerate(sent):
        alone = Rig(num_blocks=256, block_size=block_size, enabled=False)
        expected = alone.submit(tokens, max_tokens, n=n, seed=i)
        alone.run()
        for got, wanted in zip(ids_of(stream), ids_of(expected), strict=True):
            assert got == (wanted[: len(got)] if any(stream is s for _, s in doomed) else wanted)


PROMPTS = [prompt(40, i) for i in range(6)]
ASK: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def real() -> tuple[LoadedModel, int, list[tuple[int, ...]]]:
    """A model, the bytes of a block of it, and its answers to PROMPTS where there is room."""
    model, tokenizer = tiny_models.build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny-llama")
    with Engine(loaded, kv_memory="1MiB", prefix_cache=False) as roomy:
        per_block = 2**20 // roomy.stats().num_blocks
        return loaded, per_block, [roomy.generate(ids, **ASK).token_ids for ids in PROMPTS]


def ask_at_once(engine: Engine) -> list[Stream]:
    """Submit all PROMPTS between the same two steps, so that they run at once for certain."""
    return engine._core.call(
        lambda: [engine.stream_generate(ids, **ASK) for ids in PROMPTS]
    ).result()


def test_a_real_model_says_the_same_when_it_was_swapped_out(
    real: tuple[LoadedModel, int, list[tuple[int, ...]]],
) -> None:
    """Float32, so that the ids are exact: whole records go to the host and back."""
    loaded, per_block, expected = real
    with Engine(loaded, kv_memory=16 * per_block, lookahead_tokens=0) as engine:
        streams = ask_at_once(engine)
        assert [stream.result().token_ids for stream in streams] == expected
        stats = engine.stats()
        assert stats.preemptions["swap"] > 0
        assert stats.swapped_in_tokens_total > 0
        assert stats.swap_used_bytes == 0
        assert engine.check() == []


def test_a_request_that_is_cancelled_while_it_is_swapped_out_leaves_nothing_behind(
    real: tuple[LoadedModel, int, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-1, with the real engine: blocks and host memory are free, the others unharmed."""
    loaded, per_block, expected = real
    with Engine(loaded, kv_memory=16 * per_block, lookahead_tokens=0) as engine:
        core, gone = engine._core, list[Stream]()
        step = core.step

        def step_and_cancel() -> None:
            """Cancel what is out, at once: it is there only between steps."""
            step()
            out = [seq.request.stream for seq in core.scheduler.waiting if seq.saved is not None]
            if out and not gone:
                assert core.swapper is not None and core.swapper.pool.used_bytes > 0
                gone.extend(out)
                for stream in out:
                    stream.abort()

        monkeypatch.setattr(core, "step", step_and_cancel)
        streams = ask_at_once(engine)
        for stream in streams:
            stream.result()
        assert gone, "nothing was swapped out"
        for stream, ids in zip(streams, expected, strict=True):
            if stream in gone:
                assert stream.result().finish_reason == "abort"
            else:
                assert stream.result().token_ids == ids
        while engine.stats().num_running:
            engine.check()
        stats = engine.stats()
        assert stats.swap_used_bytes == 0 and stats.used_blocks == 0
        assert stats.aborted_total == len(gone) and engine.check() == []
