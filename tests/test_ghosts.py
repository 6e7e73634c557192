"""Ghosts: what was evicted is known for a while, exactly, by tenant, in bounded memory."""

from __future__ import annotations

import random

import pytest

from radixkv.cache import PrefixCache
from radixkv.ghosts import Ghosts
from radixkv.identity.identity import CacheIdentity
from radixkv.tokens import encode
from tests.cache_runs import flood, fresh, identity, run

ME = identity("me")


def remembering(num_blocks: int, **bounds: int) -> PrefixCache:
    """A cache whose ghosts have these bounds."""
    cache = PrefixCache(num_blocks, 4)
    cache.ghosts = Ghosts(cache.tree, **bounds)
    cache.tree.on_evict = cache.ghosts.note
    return cache


def evicted(cache: PrefixCache, who: CacheIdentity, ids: list[int]) -> list[tuple[int, int]]:
    """The stretches of what is not resident that are known to have been."""
    tokens = encode(ids)
    resident = cache.lookup(who, tokens, max_cached=len(ids))
    return [(start, end) for start, end, _ in cache.ghosts.find(who, tokens, resident)]


def test_what_is_evicted_is_known_to_the_token() -> None:
    cache = PrefixCache(8, 4)
    text = fresh(30)
    run(cache, ME, text)
    assert evicted(cache, ME, text) == []
    flood(cache, ME, 8)
    assert cache.lookup(ME, encode(text)) == 0
    assert evicted(cache, ME, text) == [(0, 28), (28, 30)]  # its tail went by itself
    assert evicted(cache, ME, [*text, 1, 2]) == [(0, 28), (28, 30)]
    assert evicted(cache, ME, [*text[:10], 1, 2]) == [(0, 10)]


def test_what_begins_the_prompt_is_still_there_and_the_rest_is_known() -> None:
    cache = PrefixCache(8, 4)
    text = fresh(28)
    run(cache, ME, text)
    flood(cache, ME, 4)
    resident = cache.lookup(ME, encode(text))
    assert 0 < resident < 28
    assert evicted(cache, ME, text) == [(resident, 28)]


def test_what_came_back_in_part_is_known_from_there() -> None:
    """The end of what is resident lies inside of a run that was evicted."""
    cache = PrefixCache(8, 4)
    text = fresh(28)
    run(cache, ME, text)
    flood(cache, ME, 8)
    run(cache, ME, text[:10])
    assert cache.lookup(ME, encode(text)) == 10
    assert evicted(cache, ME, text) == [(10, 28)]
    flood(cache, ME, 8)
    assert cache.lookup(ME, encode(text)) == 0
    assert evicted(cache, ME, text)[-1][1] == 28  # what went first has not come back since


def test_another_path_with_the_same_blocks_is_not_taken_for_it() -> None:
    """The same tokens behind another beginning of the same length were never resident."""
    cache = PrefixCache(16, 4)
    middle, first, second = fresh(8), fresh(4), fresh(4)
    run(cache, ME, [*first, *middle])
    flood(cache, ME, 16)
    run(cache, ME, first)
    run(cache, ME, second)
    assert evicted(cache, ME, [*first, *middle]) == [(4, 12)]
    assert evicted(cache, ME, [*second, *middle]) == []


def test_nobody_knows_what_another_tenant_or_identity_lost() -> None:
    """SECURITY-1: not even that it was there."""
    cache = PrefixCache(8, 4)
    text = fresh(16)
    run(cache, ME, text)
    flood(cache, ME, 8)
    assert evicted(cache, ME, text)
    for other in (identity("you"), identity("me", "salt"), identity("me", adapter="a"), identity()):
        assert evicted(cache, other, text) == []


def test_a_leaf_that_is_eaten_block_by_block_is_one_run() -> None:
    """As decoding does: one record a run, not one a block."""
    cache = PrefixCache(65, 4)
    text = fresh(64 * 4)
    run(cache, ME, text)
    with cache.open(cache.acquire(ME, encode(fresh(1)))) as table:
        for _ in range(63 * 4):
            table.reserve(1)
            table.commit(1)
    assert cache.lookup(ME, encode(text)) <= 2 * 4
    assert cache.ghosts.num_runs == 1
    assert evicted(cache, ME, text)[0][1] == len(text)


def test_a_leaf_that_grows_between_two_cuts_keeps_both_apart() -> None:
    cache = PrefixCache(8, 4)
    text = fresh(24)
    run(cache, ME, text)
    flood(cache, ME, 4)
    kept = cache.lookup(ME, encode(text))
    assert 0 < kept < 24
    other = [*text[:kept], *fresh(4)]
    run(cache, ME, other)
    flood(cache, ME, 8)
    assert evicted(cache, ME, text)[-1][1] == 24
    assert evicted(cache, ME, other)[-1][1] == len(other)
    assert evicted(cache, ME, [*other, *text[kept + 4 :]])[-1][1] == len(other)


def test_the_oldest_are_forgotten_first() -> None:
    cache = remembering(4, max_bytes=1100)  # a run is of 64 bytes, and 256
    texts = [fresh(16) for _ in range(6)]
    for text in texts:
        run(cache, ME, text)
    assert cache.ghosts.num_runs == 3
    known = [bool(evicted(cache, ME, text)) for text in texts]
    assert known == [False, False, True, True, True, False]  # the last is resident


def test_memory_is_bounded_for_each_tenant_and_for_all() -> None:
    cache = remembering(8, max_bytes=1000, max_total_bytes=3000)
    for i in range(200):
        run(cache, identity(f"tenant {i % 7}"), fresh(random.Random(i).randint(1, 30)))
        assert cache.ghosts.num_bytes <= 3000
    assert cache.ghosts.num_bytes > 2000


def test_a_loud_tenant_does_not_silence_a_quiet_one() -> None:
    cache = remembering(8, max_bytes=2000, max_total_bytes=2400)
    quiet, text = identity("quiet"), fresh(16)
    run(cache, quiet, text)
    for _ in range(100):
        run(cache, identity("loud"), fresh(28))
        run(cache, identity("louder"), fresh(28))
    assert evicted(cache, quiet, text) == [(0, 16)]


def test_a_reset_is_an_eviction() -> None:
    """DIAG-3: what was there and is cleared is not "never seen"."""
    cache = PrefixCache(64, 4)
    stem = fresh(10)
    texts = [[*stem, *fresh(9)] for _ in range(5)]
    for text in texts:
        run(cache, ME, text)
    cache.reset()
    for text in texts:
        assert evicted(cache, ME, text)[-1][1] == 19
    assert evicted(cache, ME, fresh(9)) == []


def test_a_tenant_is_forgotten_by_name_and_all_with_the_counters() -> None:
    cache = PrefixCache(8, 4)
    mine, yours, you = fresh(16), fresh(16), identity("you")
    run(cache, ME, mine)
    run(cache, you, yours)
    flood(cache, ME, 8)
    cache.ghosts.forget("you")
    assert not evicted(cache, you, yours) and evicted(cache, ME, mine)
    run(cache, you, yours)
    flood(cache, ME, 8)
    assert evicted(cache, you, yours) == [(0, 16)]
    cache.clear_counters()
    assert not evicted(cache, ME, mine) and cache.ghosts.num_bytes == 0


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_called_evicted_was_resident_once(seed: int) -> None:
    """And whatever was resident and is not is called so, to the block where it begins."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3])
    cache = PrefixCache(rng.randint(6, 30), size)
    me = identity("me", block_size=size)
    seen: set[tuple[int, ...]] = set()
    texts: list[list[int]] = [[]]
    for _ in range(150):
        old = rng.choice(texts)
        text = old[: rng.randrange(len(old) + 1)]
        text = (text + [rng.randrange(3) for _ in range(rng.randint(1, 9))])[: 5 * size]
        texts = [*texts[-8:], text]
        tokens = encode(text)
        resident = cache.lookup(me, tokens, max_cached=len(text))
        known = resident
        for start, end, when in cache.ghosts.find(me, tokens, resident):
            assert start == known < end and when <= cache.tree.clock
            assert tuple(text[:end]) in seen
            known = end
        whole = max((n for n in range(0, len(text), size) if tuple(text[:n]) in seen), default=0)
        assert known >= whole
        tail = rng.random() < 0.5
        if cache.available * size > len(text) + size:
            run(cache, me, text, tail=tail)
            ends = len(text) if tail else len(text) // size * size
            seen |= {tuple(text[:n]) for n in range(1, ends + 1)}
    assert cache.check() == []
