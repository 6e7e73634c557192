"""Beams in the batch, on a fake model: they share, copy, yield, wake and die with the others."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.errors import NeverFits, RadixKVError
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.stream import Stream
from tests.beam_cases import by_hand, shown
from tests.fake_model import VOCAB, Rig, greedy, ids_of, logits_after


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def expected(ids: list[int], params: BeamParams, max_tokens: int, n: int = 1) -> list[list[int]]:
    answers = by_hand(
        lambda tokens: logits_after(tokens),
        ids,
        width=params.width,
        n=n,
        max_tokens=max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    return shown(answers, ())


def tables(rig: Rig) -> list[list[int]]:
    """The blocks of each running sequence."""
    return [seq.table.blocks.tolist() for seq in rig.core.scheduler.running if seq.table]


@pytest.mark.parametrize("length", range(1, 10))
def test_beams_fork_at_every_offset_of_a_block_and_read_their_own(length: int) -> None:
    """COW-3: each branch is that of a search that shares nothing, at offsets 0 to B-1."""
    rig = Rig(block_size=4)
    stream = rig.submit(prompt(length, 1), 14, n=4, beams=BeamParams(4))
    rig.run()
    assert ids_of(stream) == expected(prompt(length, 1), BeamParams(4), 14, 4)


def test_a_step_copies_no_more_than_the_begun_tail_of_each_beam() -> None:
    """Bytes copied are at most ``width`` blocks a step, and none where tails are full (COW-1)."""
    rig = Rig(block_size=4)
    stream = rig.submit(prompt(10, 2), 30, n=5, beams=BeamParams(5))
    rig.run()
    copied = 0
    for batch in rig.runner.batches:
        assert len(batch.copies) <= 4  # of k that share a tail the last writes in place
        assert all(0 < valid < 4 for _, _, valid in batch.copies)
        if batch.copies:
            assert all((length - 1) % 4 for length in batch.kv_lens)
        copied += len(batch.copies)
    group = stream.beams
    assert group is not None and group.copied_blocks == copied > 0
    assert 0 < group.copied_tokens <= 3 * copied
    assert group.num_steps == 30 and group.most_copied <= 4
    assert rig.cache.stats().cow_copies == copied


def test_beams_hold_the_prompt_once_and_what_they_have_in_common() -> None:
    """After each step the prompt's whole blocks are the same ones for all beams, and blocks that no
    beam holds are free: forks and deaths go by reference counts alone."""
    rig = Rig(block_size=4)
    rig.submit(prompt(11, 3), 40, beams=BeamParams(4))
    rig.turn()
    saved = 0
    while not rig.core.scheduler.idle:
        rig.turn()
        held = tables(rig)
        if held:
            assert len({tuple(blocks[:2]) for blocks in held}) == 1
            distinct = {block for blocks in held for block in blocks}
            saved += sum(map(len, held)) - len(distinct)
            stats = rig.cache.stats()
            taken = stats.num_blocks - stats.free_blocks - stats.evictable_blocks
            assert taken == len(distinct)
    assert saved > 0
    rig.assert_at_rest()


def test_the_prompt_comes_from_the_cache_and_goes_back_to_it() -> None:
    rig = Rig(block_size=4)
    rig.submit(prompt(15, 4), 2)
    rig.run()
    before = rig.runner.tokens_computed
    stream = rig.submit(prompt(15, 4), 6, n=2, beams=BeamParams(3))
    rig.run()
    assert stream.usage.cached_tokens == 14
    assert stream.usage.prompt_tokens == 15 and stream.usage.completion_tokens == 12
    assert rig.runner.tokens_computed - before == 1 + 3 * 5
    fresh = rig.submit([*prompt(15, 4), 9], 1)
    rig.run()
    assert fresh.usage.cached_tokens == 15


def test_what_beams_generate_is_counted_with_those_that_died() -> None:
    """The usage tells of answers, the counters and the tenant's level of work."""
    rig = Rig()
    stream = rig.submit(prompt(6, 5), 10, n=1, beams=BeamParams(4))
    rig.run()
    assert stream.usage.completion_tokens == 10
    assert rig.core.stats.generation_tokens_total == 40
    assert rig.core.stats.by_tenant["local"].generation_tokens_total == 40
    assert rig.core.stats.finished == {"length": 1}


def test_beams_take_their_places_before_they_are_born() -> None:
    rig = Rig(max_num_seqs=4)
    rig.submit(prompt(4, 6), 30)
    rig.turn()
    stream = rig.submit(prompt(9, 7), 5, beams=BeamParams(4))
    rig.turn(3)
    assert rig.core.stats.num_running == 1 and rig.core.stats.num_waiting == 1
    rig.run()
    assert ids_of(stream) == expected(prompt(9, 7), BeamParams(4), 5)


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 7])
def test_a_budget_below_the_width_makes_beams_wait_for_one_another(max_batch_tokens: int) -> None:
    rig = Rig(max_batch_tokens=max_batch_tokens)
    stream = rig.submit(prompt(9, 8), 7, n=4, beams=BeamParams(4))
    other = rig.submit(prompt(5, 9), 9)
    rig.run()
    assert ids_of(stream) == expected(prompt(9, 8), BeamParams(4), 7, 4)
    assert ids_of(other) == [greedy(prompt(5, 9), 9)]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("swap_memory", [0, 10_000])
def test_beams_are_preempted_together_and_go_on_where_they_were(
    swap_memory: int, enabled: bool
) -> None:
    rig = Rig(num_blocks=26, block_size=4, swap_memory=swap_memory, enabled=enabled)
    rig.runner.copy_s = 1e-9
    first = rig.submit(prompt(20, 10), 60)
    beams = rig.submit(prompt(10, 11), 24, n=3, beams=BeamParams(3))
    seen_asleep = 0
    rig.turn()
    while not rig.core.scheduler.idle:
        rig.turn()
        group = beams.beams
        if group is not None and group.asleep:
            seen_asleep += 1
            assert len(group.asleep) == 2
    rig.assert_at_rest()
    assert seen_asleep and rig.core.stats.preemptions_total == 3
    assert ids_of(first) == [greedy(prompt(20, 10), 60)]
    assert ids_of(beams) == expected(prompt(10, 11), BeamParams(3), 24, 3)
    assert beams.usage.cached_tokens == 0  # as of its first admission (USAGE-3)
    if swap_memory:
        assert rig.core.stats.preemptions["swap"] > 0
        assert rig.core.stats.swapped_in_tokens_total > 0


@pytest.mark.parametrize("length", [1, 4, 6, 7, 8, 13])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_search_that_just_fits_ends_though_others_press(length: int, width: int) -> None:
    """What is let in alone is never preempted for ever: others come and go, and it has its room."""
    rig = Rig(num_blocks=16, block_size=4, lookahead_tokens=64)
    params = SamplingParams(beams=BeamParams(width), n=width)
    most = Capacity(16, 4, 1000).max_tokens(length, params, param="prompt")
    early = rig.submit(prompt(9, 12), 30)
    rig.turn(2)
    stream = rig.submit(prompt(length, 13), most, n=width, beams=params.beams)
    late = [rig.submit(prompt(7, 14 + i), 20) for i in range(3)]
    rig.run()
    assert ids_of(stream) == expected(prompt(length, 13), BeamParams(width), most, width)
    assert ids_of(early) == [greedy(prompt(9, 12), 30)]
    assert [ids_of(s) for s in late] == [[greedy(prompt(7, 14 + i), 20)] for i in range(3)]


def test_a_search_larger_than_the_pool_is_refused_by_its_size() -> None:
    params = SamplingParams(beams=BeamParams(5), max_tokens=40)
    with pytest.raises(NeverFits):
        Capacity(16, 4, 1000).max_tokens(9, params, param="prompt")


@pytest.mark.parametrize("turns", range(0, 12, 2))
@pytest.mark.parametrize("swap_memory", [0, 10_000])
def test_an_abort_at_any_stage_gives_everything_back(turns: int, swap_memory: int) -> None:
    """LEAK: while it waits, reads its prompt, searches, or sleeps."""
    rig = Rig(num_blocks=20, block_size=4, max_batch_tokens=8, swap_memory=swap_memory)
    rig.submit(prompt(20, 20), 40)
    stream = rig.submit(prompt(22, 21), 9, n=2, beams=BeamParams(3))
    rig.turn(turns)
    stream.abort()
    rig.turn()
    assert stream.finished
    assert [choice.finish_reason for choice in stream.result().choices] == ["abort"] * 2
    assert [choice.token_ids for choice in stream.result().choices] == [(), ()]
    rig.run()
    if rig.core.swapper is not None:
        assert rig.core.swapper.pool.used_bytes == 0


def test_logits_that_are_no_numbers_fail_the_search_and_nobody_else() -> None:
    rig = Rig()
    forward = rig.runner.forward

    def broken(batch: Any) -> Any:
        logits = forward(batch)
        if len(logits) > 2:
            logits[-1, 5] = float("nan")
        return logits

    rig.runner.forward = broken  # type: ignore[method-assign]
    other = rig.submit(prompt(4, 30), 12)
    stream = rig.submit(prompt(9, 31), 8, beams=BeamParams(3))
    rig.run()
    with pytest.raises(RadixKVError, match="nan"):
        stream.result()
    assert ids_of(other) == [greedy(prompt(4, 30), 12)]
    assert rig.core.stats.failed_total == 1


def test_tenants_search_apart() -> None:
    """TENANT: the same prompt of another finds nothing, and says the same."""
    rig = Rig()
    streams = []
    for tenant in ("a", "b", "a"):
        origin = Origin(tenant=tenant)
        streams.append(rig.submit(prompt(12, 40), 6, n=2, beams=BeamParams(3), origin=origin))
        rig.run()
    assert [s.usage.cached_tokens for s in streams] == [0, 0, 11]
    assert len({str(ids_of(s)) for s in streams}) == 1


def test_new_weights_while_beams_sleep_leave_nothing_of_the_old() -> None:
    """ADMIN-2: what was saved of them is worthless, and given back."""
    rig = Rig(num_blocks=26, block_size=4, swap_memory=10_000)
    rig.runner.copy_s = 1e-9
    rig.submit(prompt(20, 10), 60)
    stream = rig.submit(prompt(10, 11), 24, n=3, beams=BeamParams(3))
    while stream.beams is None or not stream.beams.asleep:
        rig.turn()
    assert rig.core.swapper is not None and rig.core.swapper.pool.used_bytes
    rig.core.weights_changed()
    assert not rig.core.swapper.pool.used_bytes
    rig.run()
    assert ids_of(stream) == expected(prompt(10, 11), BeamParams(3), 24, 3)


ANSWERS: dict[str, list[list[int]]] = {}
LENGTHS = st.integers(1, 18)
COMMON = prompt(30, 99)


class BeamsAmongOthers(RuleBasedStateMachine):
    """Searches, draws and plain requests under a pool too small, aborted now and then: all that end
    say what they say alone, and after every step the books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig | None = None
        self.asked: list[tuple[Stream, list[int], int, int, BeamParams | None]] = []

    @rule(
        num_blocks=st.integers(8, 22),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([2, 5, 32]),
        lookahead=st.sampled_from([0, 16]),
        swap=st.sampled_from([0, 400, 10_000]),
        enabled=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        lookahead: int,
        swap: int,
        enabled: bool,
    ) -> None:
        if self.rig is None:
            self.rig = Rig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_batch_tokens=budget,
                max_num_seqs=6,
                lookahead_tokens=lookahead,
                swap_memory=swap,
                enabled=enabled,
            )

    def ask(self, ids: list[int], max_tokens: int, n: int, beams: BeamParams | None) -> None:
        if self.rig is None:
            return
        cache = self.rig.cache
        params = SamplingParams(n=n, beams=beams)
        try:
            most = Capacity(cache.num_blocks, cache.block_size, 1000).max_tokens(
                len(ids), params, param="prompt"
            )
        except NeverFits:
            return
        max_tokens = min(max_tokens, most)
        stream = self.rig.submit(ids, max_tokens, n=n, beams=beams)
        self.asked.append((stream, ids, max_tokens, n, beams))

    @rule(
        common=LENGTHS,
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        width=st.integers(1, 5),
        early=st.sampled_from([True, False, "never"]),
    )
    def search(self, common: int, own: int, max_tokens: int, width: int, early: Any) -> None:
        ids = COMMON[:common] + [40 + width] * own
        self.ask(ids, max_tokens, width, BeamParams(width, 1.0, early))

    @rule(common=LENGTHS, own=st.integers(0, 3), max_tokens=st.integers(1, 20))
    def complete(self, common: int, own: int, max_tokens: int) -> None:
        self.ask(COMMON[:common] + [50] * own, max_tokens, 1, None)

    @rule(common=LENGTHS, max_tokens=st.integers(1, 8), n=st.integers(2, 3))
    def draw(self, common: int, max_tokens: int, n: int) -> None:
        self.ask(COMMON[:common], max_tokens, n, None)

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        if self.rig is not None:
            self.rig.turn(times)

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        if which < len(self.asked):
            self.asked[which][0].abort()

    @invariant()
    def copies_are_few(self) -> None:
        if self.rig is not None and self.rig.runner.batches:
            batch = self.rig.runner.batches[-1]
            assert len(batch.copies) <= batch.num_seqs

    def teardown(self) -> None:
        if self.rig is None:
            return
        self.rig.run()
        for stream, ids, max_tokens, n, beams in self.asked:
            choices = stream.result().choices
            if any(choice.finish_reason == "abort" for choice in choices):
                continue
            if beams is None:
                wanted = [greedy(ids, max_tokens)] * n
            else:
                key = repr((ids, beams, max_tokens, n))
                if key not in ANSWERS:
                    ANSWERS[key] = expected(ids, beams, max_tokens, n)
                wanted = ANSWERS[key]
            assert [list(choice.token_ids) for choice in choices] == wanted


TestBeamsAmongOthers = BeamsAmongOthers.TestCase
TestBeamsAmongOthers.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
