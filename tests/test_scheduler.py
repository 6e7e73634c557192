"""The scheduler, in an engine core on a fake model: who runs, waits, yields and shares."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.engine.stream import Stream
from radixkv.service.engine.waiting import MAX_SKIPS
from radixkv.service.engine.work import Plan
from tests.fake_model import Rig, greedy, ids_of


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


def test_a_request_is_answered_as_if_there_were_no_cache() -> None:
    rig = Rig()
    stream = rig.submit(prompt(13, 1), 6)
    rig.run()
    assert ids_of(stream) == [greedy(prompt(13, 1), 6)]


def test_a_long_prefill_is_cut_into_chunks_of_the_token_budget() -> None:
    """CORRECT-4: later chunks go on at their absolute position."""
    rig = Rig(max_batch_tokens=8)
    stream = rig.submit(prompt(50, 1), 2)
    rig.run()
    assert max(batch.num_tokens for batch in rig.runner.batches) == 8
    assert ids_of(stream) == [greedy(prompt(50, 1), 2)]
    for shared in (24, 27, 50):
        again = rig.submit(prompt(50, 1)[:shared] + [1, 2], 2)
        rig.run()
        assert again.usage.cached_tokens == shared


def test_a_decode_goes_on_while_a_long_prompt_is_prefilled() -> None:
    rig = Rig(max_batch_tokens=8)
    rig.submit(prompt(4, 1), 30)
    rig.turn(2)
    rig.submit(prompt(60, 2), 1)
    rig.turn(3)
    assert all(1 in batch.query_lens for batch in rig.runner.batches[2:])


def test_a_short_request_admitted_midway_ends_before_a_long_one() -> None:
    rig = Rig()
    long = rig.submit(prompt(8, 1), 40)
    rig.turn(3)
    short = rig.submit(prompt(8, 2), 3)
    rig.turn(4)
    assert short.finished and not long.finished


def test_a_warm_prompt_computes_only_its_last_token() -> None:
    """CORRECT-8: a full hit of any length leaves exactly one token to compute."""
    for length in (1, 8, 9, 11):
        rig = Rig()
        first = rig.submit(prompt(length, 1), 2)
        rig.run()
        before = rig.runner.tokens_computed
        again = rig.submit(prompt(length, 1), 2)
        rig.run()
        assert again.usage.cached_tokens == length - 1
        assert rig.runner.tokens_computed - before == 2  # the last of the prompt, one of the answer
        assert ids_of(again) == ids_of(first)


def test_a_burst_with_one_cold_prefix_computes_it_once() -> None:
    """SCHED-4: followers wait for the leader's blocks instead of computing them again."""
    rig = Rig(num_blocks=512, max_batch_tokens=64)
    shared = prompt(200, 1)
    streams = [rig.submit(shared + prompt(5, 10 + i), 3) for i in range(16)]
    rig.run()
    assert rig.core.counters.prompt_tokens_computed == 200 + 16 * 5
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(shared + prompt(5, 10 + i), 3)]


def test_identical_cold_prompts_leave_one_copy() -> None:
    """CORRECT-9."""
    rig = Rig()
    streams = [rig.submit(prompt(22, 1), 3) for _ in range(8)]
    rig.run()
    assert {tuple(ids_of(stream)[0]) for stream in streams} == {tuple(greedy(prompt(22, 1), 3))}
    assert rig.cache.stats().cached_blocks == -(-(22 + 2) // 4)


def test_followers_go_ahead_when_their_leader_is_aborted() -> None:
    rig = Rig(max_batch_tokens=8)
    leader = rig.submit(prompt(100, 1), 3)
    follower = rig.submit(prompt(100, 1) + [5], 3)
    rig.turn(3)
    leader.abort()
    rig.run()
    assert ids_of(follower) == [greedy(prompt(100, 1) + [5], 3)]


def test_with_the_cache_off_nobody_waits_for_anybody_and_nothing_stays() -> None:
    rig = Rig(enabled=False)
    streams = [rig.submit(prompt(12, 1), 3) for _ in range(3)]
    rig.run()
    assert [stream.usage.cached_tokens for stream in streams] == [0, 0, 0]
    assert rig.cache.stats().free_blocks == 64
    assert rig.core.counters.prompt_tokens_computed == 36


def test_forced_misses_answer_right_and_hit_nothing() -> None:
    rig = Rig(force_miss=True)
    for _ in range(3):
        stream = rig.submit(prompt(12, 1), 3)
        rig.run()
        assert stream.usage.cached_tokens == 0
        assert ids_of(stream) == [greedy(prompt(12, 1), 3)]


def test_the_longest_cached_prefix_goes_first() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(prompt(20, 1), 1)
    rig.run()
    rig.submit(prompt(6, 9), 8)
    rig.turn()
    cold = rig.submit(prompt(20, 2), 2)
    warm = rig.submit(prompt(20, 1), 2)
    rig.run()
    assert warm.admitted_s is not None and cold.admitted_s is not None
    assert warm.admitted_s < cold.admitted_s


def test_a_cold_request_among_hot_ones_waits_a_bounded_number_of_admissions() -> None:
    """SCHED-2: ageing bounds what longest-prefix-first would starve."""
    rig = Rig(max_num_seqs=1)
    rig.submit(prompt(20, 1), 1)
    rig.run()
    rig.submit(prompt(6, 9), 2)
    rig.turn()
    cold = rig.submit(prompt(20, 2), 2)
    hot: list[Stream] = []
    for i in range(400):
        if sum(not stream.finished for stream in hot) < 3:
            hot.append(rig.submit(prompt(20, 1) + [i % 60 + 1], 2))
        rig.turn()
        if cold.finished:
            break
    ahead = sum(
        stream.admitted_s is not None
        and cold.admitted_s is not None
        and stream.admitted_s < cold.admitted_s
        for stream in hot
    )
    assert cold.finished
    assert 1 <= ahead <= MAX_SKIPS


def test_nobody_is_passed_over_more_often_than_promised_in_one_step_either() -> None:
    """SCHED-2: forty small requests come while one that needs most of the pool waits for room."""
    rig = Rig(num_blocks=32, max_num_seqs=40, max_batch_tokens=400)
    rig.submit(prompt(20, 1), 60)
    rig.turn()
    large = rig.submit(prompt(100, 2), 4)
    small = [rig.submit(prompt(2, 100 + i), 1) for i in range(40)]
    rig.run()
    assert large.admitted_s is not None
    ahead = [stream for stream in small if (stream.admitted_s or 0.0) < large.admitted_s]
    assert len(ahead) == MAX_SKIPS


def test_a_follower_is_not_passed_over_for_ever_while_it_waits_for_its_leader() -> None:
    """SCHED-2 and SCHED-4."""
    rig = Rig(num_blocks=256, max_num_seqs=64, max_batch_tokens=400)
    rig.submit(prompt(40, 1), 2)
    follower = rig.submit(prompt(40, 1), 2)
    others = [rig.submit(prompt(3, 100 + i), 2) for i in range(40)]
    rig.run()
    assert follower.admitted_s is not None
    ahead = [stream for stream in others if (stream.admitted_s or 0.0) < follower.admitted_s]
    assert len(ahead) == MAX_SKIPS
    assert follower.usage.cached_tokens == 39


def test_more_work_than_blocks_finishes_all_the_same() -> None:
    """SCHED-1: requests that need three times the pool queue and preempt; none hangs."""
    rig = Rig(num_blocks=16, max_num_seqs=8)
    streams = [rig.submit(prompt(10, i), 30) for i in range(8)]
    rig.run()
    assert rig.core.counters.preemptions > 0
    for i, stream in enumerate(streams):
        assert ids_of(stream) == [greedy(prompt(10, i), 30)]


def test_preemption_takes_the_latest_request_first() -> None:
    rig = Rig(num_blocks=12, max_num_seqs=4)
    streams = [rig.submit(prompt(9, i), 24) for i in range(3)]
    rig.run()
    assert rig.core.counters.preemptions > 0
    finished = [stream.finished_s for stream in streams]
    assert finished == sorted(finished, key=lambda s: s or 0.0)


def test_a_preempted_request_reports_what_was_cached_at_first_admission() -> None:
    """USAGE-3 and METRICS-2: recomputation is counted apart, never as a hit."""
    rig = Rig(num_blocks=14, max_num_seqs=4)
    streams = [rig.submit(prompt(10, i), 30) for i in range(4)]
    rig.run()
    counters, cache = rig.core.counters, rig.cache.stats()
    assert counters.preemptions > 0
    assert [stream.usage.cached_tokens for stream in streams] == [0] * 4
    assert cache.hit_tokens == 0 and cache.queried_tokens == 40
    assert counters.prompt_tokens_computed == 40
    assert counters.recomputed_tokens > 0


def test_what_others_computed_while_a_request_was_preempted_is_counted_apart() -> None:
    """METRICS-2: neither a hit, nor computed by it, nor lost; and the sum still holds."""
    rig = Rig(num_blocks=9, max_batch_tokens=6, max_num_seqs=4)
    rig.submit(prompt(24, 1)[:7], 9)
    for length, max_tokens in ((6, 4), (12, 4), (16, 1)):
        rig.submit(prompt(24, 1)[:length], max_tokens)
        rig.turn()
    rig.run()
    counters = rig.core.counters
    assert counters.prompt_tokens_found_later > 0
    assert (
        counters.prompt_tokens
        == 41
        == (
            counters.prompt_tokens_cached
            + counters.prompt_tokens_found_later
            + counters.prompt_tokens_computed
        )
    )


def test_a_copy_that_was_never_made_is_never_found() -> None:
    """COW-1: a choice is preempted between the reservation of its own tail and the copy."""
    rig = Rig()
    stream = rig.submit(prompt(6, 1), 5, n=2, seed=3)
    rig.turn()
    scheduler = rig.core.scheduler
    first, _ = scheduler.running
    plan = Plan(budget=1)
    scheduler.live.go_on(first, plan)
    assert plan.works[first].copies
    scheduler.live.preempt(first, plan)
    rig.run()
    roomy = Rig()
    expected = roomy.submit(prompt(6, 1), 5, n=2, seed=3)
    roomy.run()
    assert ids_of(stream) == ids_of(expected)


def test_a_request_that_waits_holds_nothing() -> None:
    """SCHED-3: what a waiting request matched stays evictable by those that run."""
    rig = Rig(num_blocks=8, max_num_seqs=4)
    rig.submit(prompt(16, 1), 1)
    rig.run()
    running = rig.submit(prompt(9, 2), 20)
    rig.turn()
    waiting = rig.submit(prompt(16, 1) + prompt(12, 3), 4)
    rig.turn(15)
    assert not waiting.finished
    assert rig.cache.stats().referenced_blocks <= 8
    rig.run()
    assert ids_of(running) == [greedy(prompt(9, 2), 20)]
    assert ids_of(waiting) == [greedy(prompt(16, 1) + prompt(12, 3), 4)]


def test_a_request_as_large_as_the_pool_runs_even_from_a_partial_hit() -> None:
    """The copied block needs its source too; alone in a full pool the source is given up."""
    rig = Rig(num_blocks=4)
    first = rig.submit(prompt(16, 1), 1)
    rig.run()
    again = rig.submit(prompt(15, 1), 2)
    rig.run()
    assert ids_of(first) == [greedy(prompt(16, 1), 1)]
    assert ids_of(again) == [greedy(prompt(15, 1), 2)]


def test_questions_under_one_prefix_get_their_own_answers() -> None:
    """CORRECT-7: one after another in a pool for one, none is given its predecessor's suffix."""
    rig = Rig(num_blocks=9, max_num_seqs=1)
    shared = prompt(18, 1)
    for question in range(5):
        asked = shared + prompt(5, 50 + question)
        stream = rig.submit(asked, 6)
        rig.run()
        assert ids_of(stream) == [greedy(asked, 6)]
        assert stream.usage.cached_tokens == (0 if question == 0 else 18)


def test_parallel_samples_share_the_prompt_and_copy_its_tail() -> None:
    """COW-1: four choices of a prompt of two and a half blocks equal four unshared ones."""
    rig = Rig()
    stream = rig.submit(prompt(10, 1), 6, n=4, seed=7)
    rig.turn()
    assert rig.cache.stats().referenced_blocks == 3
    rig.turn()
    assert rig.cache.stats().referenced_blocks == 2 + 4
    assert rig.cache.stats().cow_copies == 3  # the last writes in place
    rig.run()
    alone = Rig(enabled=False)
    expected = alone.submit(prompt(10, 1), 6, n=4, seed=7)
    alone.run()
    assert ids_of(stream) == ids_of(expected)
    assert len({tuple(ids) for ids in ids_of(stream)}) > 1
    assert rig.core.counters.prompt_tokens_computed == 10


def test_a_group_of_choices_survives_preemption() -> None:
    rig = Rig(num_blocks=14, max_num_seqs=8)
    streams = [rig.submit(prompt(10, i), 14, n=3, seed=i) for i in range(3)]
    rig.run()
    assert rig.core.counters.preemptions > 0
    roomy = Rig(num_blocks=256)
    expected = [roomy.submit(prompt(10, i), 14, n=3, seed=i) for i in range(3)]
    roomy.run()
    assert [ids_of(stream) for stream in streams] == [ids_of(stream) for stream in expected]


@pytest.mark.parametrize("turns", range(9))
def test_an_abort_at_any_stage_gives_everything_back(turns: int) -> None:
    """LEAK-1 and CORRECT-3: queued, before its first forward, mid-prefill, mid-decode."""
    rig = Rig(max_batch_tokens=8)
    stream = rig.submit(prompt(30, 1), 6, n=2, seed=1)
    rig.turn(turns)
    stream.abort()
    rig.turn()
    assert stream.finished
    assert rig.core.scheduler.idle
    rig.assert_at_rest()
    again = rig.submit(prompt(30, 1), 3)
    rig.run()
    assert ids_of(again) == [greedy(prompt(30, 1), 3)]


def test_an_aborted_request_that_waits_is_forgotten() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(prompt(5, 1), 20)
    waiting = rig.submit(prompt(5, 2), 5)
    rig.turn(2)
    waiting.abort()
    rig.turn()
    assert waiting.finished and not rig.core.scheduler.waiting
    assert waiting.result().finish_reason == "abort"


def test_identities_never_share() -> None:
    rig = Rig()
    rig.submit(prompt(20, 1), 1, identity="a")
    rig.run()
    other = rig.submit(prompt(20, 1), 1, identity="b")
    rig.run()
    assert other.usage.cached_tokens == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which shared beginning
        st.integers(1, 14),  # how much of it
        st.lists(st.integers(3, 5), max_size=6),  # what follows
        st.integers(1, 10),  # max_tokens
        st.integers(1, 3),  # n
        st.integers(0, 6),  # turns before the next request
        st.integers(-8, 8),  # abort after so many turns, if positive
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    block_size=st.sampled_from([1, 2, 3, 4]),
    num_tokens=st.integers(40, 120),
    budget=st.integers(3, 40),
    max_num_seqs=st.integers(3, 8),
)
def test_any_schedule_gives_the_answers_of_requests_run_alone(
    requests: list[tuple[int, int, list[int], int, int, int, int]],
    block_size: int,
    num_tokens: int,
    budget: int,
    max_num_seqs: int,
) -> None:
    """CORRECT-1, CORRECT-10, SECURITY-7: small pools, aborts and sharing never change an answer."""
    num_blocks = max(num_tokens // block_size, 36 // block_size + 3 * (10 // block_size + 2))
    rig = Rig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=max_num_seqs,
    )
    sent: list[tuple[Stream, list[int], int, int]] = []
    aborts: list[tuple[int, Stream]] = []
    clock = 0
    for i, (start, length, rest, max_tokens, n, pause, abort) in enumerate(requests):
        tokens = prompt(14, start)[:length] + rest
        stream = rig.submit(tokens, max_tokens, n=n, seed=i)
        sent.append((stream, tokens, max_tokens, n))
        if abort > 0:
            aborts.append((clock + abort, stream))
        for _ in range(pause):
            for when, doomed in aborts:
                if when == clock:
                    doomed.abort()
            rig.turn()
            clock += 1
    rig.run()
    doomed_streams = {stream for _, stream in aborts}
    for i, (stream, tokens, max_tokens, n) in enumerate(sent):
        alone = Rig(num_blocks=256, block_size=block_size, enabled=False)
        expected = alone.submit(tokens, max_tokens, n=n, seed=i)
        alone.run()
        for got, wanted in zip(ids_of(stream), ids_of(expected), strict=True):
            if stream in doomed_streams:
                assert got == wanted[: len(got)]
            else:
                assert got == wanted
