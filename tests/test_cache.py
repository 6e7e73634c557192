"""The cache as its users see it: hits, leases, counters, modes, reset."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import CacheBusy, IdentityMismatch, OutOfBlocks
from radixkv.identity.identity import CacheIdentity
from radixkv.table import BlockTable
from radixkv.tokens import encode

MODEL = CacheIdentity.local("m")
OTHER = CacheIdentity.local("n")


def run(cache: PrefixCache, ids: Any, identity: CacheIdentity = MODEL, tail: bool = False) -> int:
    """One whole request; return what was cached."""
    tokens = encode(ids)
    with cache.open(cache.acquire(identity, tokens)) as table:
        n = len(tokens) // 4 - table.num_tokens
        table.reserve(n)
        table.commit(n)
        table.publish(tokens, tail=tail)
        return table.cached_tokens


def test_a_full_hit_leaves_exactly_the_last_token() -> None:
    """CORRECT-8: a multiple of the block, one more, and a single token."""
    for n, expected in ((64, 63), (65, 64), (1, 0)):
        cache = PrefixCache(16)
        assert run(cache, range(n), tail=True) == 0
        assert run(cache, range(n)) == expected


def test_how_much_may_be_cached_can_be_asked_for() -> None:
    cache = PrefixCache(16)
    run(cache, range(64))
    tokens = encode(range(64))
    found = [cache.lookup(MODEL, tokens, max_cached=n) for n in (-1, 0, 1, 16, 20, 64, 100)]
    assert found == [0, 0, 1, 16, 20, 64, 64]
    with cache.acquire(MODEL, tokens, max_cached=20) as lease:
        assert lease.cached_tokens == 20 and len(lease.blocks) == 2
        assert lease.blocks.dtype == np.int32


def test_anything_that_encodes_may_be_asked_for() -> None:
    cache = PrefixCache(16)
    run(cache, list(range(40)))
    for ids in (list(range(40)), np.arange(40), bytearray(encode(range(40)))):
        assert cache.lookup(MODEL, ids) == 32  # type: ignore[arg-type]


def test_a_prefix_shorter_than_a_block_is_reused_all_the_same() -> None:
    """METRICS-4: 240 shared tokens with blocks of 256."""
    identity = CacheIdentity.local("m", 256)
    cache = PrefixCache(8, 256)
    run(cache, [*range(240), *[7] * 60], identity)
    assert run(cache, [*range(240), *[8] * 60], identity) == 240
    stats = cache.stats()
    assert (stats.hit_tokens, stats.partial_hit_tokens, stats.cow_copies) == (240, 240, 1)


def test_what_was_never_computed_is_never_found() -> None:
    """CORRECT-3: admitted, and dropped before its first forward pass."""
    cache = PrefixCache(16)
    tokens = encode(range(64))
    table = cache.open(cache.acquire(MODEL, tokens))
    table.reserve(64)
    table.release()
    assert cache.lookup(MODEL, tokens) == 0
    table = cache.open(cache.acquire(MODEL, tokens))
    table.reserve(64)
    table.commit(20)  # aborted in the middle of its prefill
    table.publish(tokens)
    table.release()
    assert cache.lookup(MODEL, tokens) == 16
    assert cache.check() == []


def test_a_lease_protects_from_the_moment_it_is_taken() -> None:
    """LEAK-3, EVICT-1: what is matched is never evicted while it is being admitted."""
    cache = PrefixCache(8)
    run(cache, range(64))
    lease = cache.acquire(MODEL, encode(range(65)))
    assert lease.cached_tokens == 64 and cache.available == 4
    greedy = cache.open(cache.acquire(OTHER, encode(range(100))))
    with pytest.raises(OutOfBlocks, match="need 7 blocks: 4 free, 0 evictable"):
        greedy.reserve(100)
    greedy.reserve(64)
    assert cache.lookup(MODEL, encode(range(65))) == 64
    lease.release()
    greedy.reserve(65)
    assert cache.lookup(MODEL, encode(range(65))) == 48


def test_looking_neither_touches_nor_counts() -> None:
    cache = PrefixCache(8)
    run(cache, [1] * 64)
    run(cache, [2] * 64)
    before = cache.stats()
    for _ in range(5):
        assert cache.lookup(MODEL, encode([1] * 65)) == 64
    assert cache.stats() == before
    run(cache, [3] * 16)
    assert cache.lookup(MODEL, encode([1] * 65)) == 48, "the older one paid, looked at or not"


def test_the_last_prompt_is_not_the_only_one_kept() -> None:
    """EVICT-5: A, B, A."""
    cache = PrefixCache(64)
    run(cache, [1] * 300)
    run(cache, [2] * 300)
    assert run(cache, [1] * 300) == 288


def test_every_hit_is_true_when_blocks_go_round() -> None:
    """CORRECT-10: eight blocks, fifty prompts, and each block's tokens known from outside."""
    identity = CacheIdentity.local("m", 4)
    cache = PrefixCache(8, 4)
    rng = random.Random(5)
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    prompts = [tuple(rng.randrange(2) for _ in range(rng.randrange(4, 25))) for _ in range(50)]
    for prompt in prompts * 2:
        for probe in prompts:
            with cache.acquire(identity, encode(probe)) as lease:
                for i in range(lease.cached_tokens // 4):
                    assert content[int(lease.blocks[i])] == probe[: 4 * (i + 1)]
        with cache.open(cache.acquire(identity, encode(prompt))) as table:
            n = len(prompt) - table.num_tokens
            table.reserve(n)
            table.commit(n)
            for i in range(table.cached_tokens // 4, len(prompt) // 4):
                content[int(table.blocks[i])] = prompt[: 4 * (i + 1)]
            table.publish(encode(prompt))
    assert cache.check() == []


def test_thousands_of_requests_leave_no_more_than_the_cache_in_use() -> None:
    """LEAK-4: usage returns to what is cached and stays between none and all."""
    cache = PrefixCache(64)
    rng = random.Random(2)
    for i in range(5000):
        run(cache, [rng.randrange(4) for _ in range(rng.randrange(1, 80))], tail=i % 3 == 0)
        stats = cache.stats()
        assert stats.used_blocks == 0
        assert 0 <= stats.evictable_blocks == stats.cached_blocks <= stats.num_blocks
        assert stats.free_blocks + stats.cached_blocks == 64
    assert cache.check() == []


def test_recomputation_after_preemption_is_counted_apart() -> None:
    """METRICS-2: random data has no hits, however often its sequences come back."""
    cache = PrefixCache(64)
    for i in range(20):
        ids = list(range(1000 * i, 1000 * i + 100))
        run(cache, ids)
        lease = cache.acquire(MODEL, encode([*ids, 1]), resumed=True)
        assert lease.cached_tokens == 96
        lease.release()
    stats = cache.stats()
    assert (stats.queries, stats.queried_tokens, stats.hit_tokens) == (20, 2000, 0)
    assert (stats.resumed_queried_tokens, stats.resumed_hit_tokens) == (20 * 101, 20 * 96)


def test_a_cancelled_lease_was_never_counted() -> None:
    cache = PrefixCache(64)
    run(cache, range(40))
    before = cache.stats()
    for resumed in (False, True):
        lease = cache.acquire(MODEL, encode(range(40)), resumed=resumed)
        assert cache.stats() != before
        lease.cancel()
        lease.cancel()
        assert cache.stats() == before


def test_counters_never_fall() -> None:
    """METRICS-1: rates are made of differences, so idle time loses nothing."""
    cache = PrefixCache(16)
    last = cache.stats()
    names = "queries queried_tokens hit_tokens partial_hit_tokens published_blocks "
    names += "deduplicated_blocks evicted_blocks cow_copies resets"
    for i in range(60):
        if i % 20 == 19:
            cache.reset()
        run(cache, [i % 7] * (10 + i), tail=True)
        run(cache, [i % 7] * 32)
        now = cache.stats()
        for name in names.split():
            assert getattr(now, name) >= getattr(last, name)
        last = now
    assert min(getattr(last, name) for name in names.split()) > 0


def test_the_version_moves_when_an_answer_may_have() -> None:
    cache = PrefixCache(4)
    versions = [cache.version]
    run(cache, range(48))
    versions.append(cache.version)
    run(cache, range(48))  # nothing new
    assert cache.version == versions[-1]
    run(cache, [5] * 32)  # evicts one
    versions.append(cache.version)
    cache.reset()
    versions.append(cache.version)
    assert len(set(versions)) == len(versions)


def test_a_reset_waits_for_nobody_and_says_who_is_in_the_way() -> None:
    cache = PrefixCache(16)
    run(cache, range(64))
    lease = cache.acquire(MODEL, encode(range(64)))
    table = cache.open(cache.acquire(MODEL, b""))
    with pytest.raises(CacheBusy, match="1 sequences and 1 leases"):
        cache.reset()
    lease.release()
    table.release()
    assert cache.reset() == 4
    assert cache.free_blocks == 16 and cache.lookup(MODEL, encode(range(64))) == 0
    assert run(cache, range(64)) == 0 and cache.check() == []


def test_a_cache_that_is_off_shares_nothing_and_keeps_nothing() -> None:
    cache = PrefixCache(16, enabled=False)
    assert run(cache, range(64)) == run(cache, range(64)) == 0
    assert cache.free_blocks == 16 and cache.check() == []


def test_a_forced_miss_takes_every_step_and_finds_nothing() -> None:
    cache = PrefixCache(16, force_miss=True)
    assert run(cache, range(64)) == run(cache, range(64)) == 0
    assert cache.lookup(MODEL, encode(range(64))) == 0
    assert cache.cached_blocks == 4 and cache.stats().deduplicated_blocks == 4
    assert cache.check() == []


def test_a_lease_is_opened_once() -> None:
    cache = PrefixCache(16)
    lease = cache.acquire(MODEL, encode([1]))
    assert isinstance(cache.open(lease), BlockTable)
    with pytest.raises(ValueError, match="opened before"):
        cache.open(lease)


def test_another_block_size_is_refused_before_anything_happens() -> None:
    cache = PrefixCache(16, 32)
    with pytest.raises(IdentityMismatch):
        cache.acquire(MODEL, encode(range(40)))
    assert cache.check() == []


def test_a_broken_count_is_reported_and_nothing_stops() -> None:
    """LEAK-2."""
    cache = PrefixCache(16)
    run(cache, range(64))
    cache.pool.counts[0] += 1
    assert cache.check() == ["block 0 is counted 2 times and held 1 times"]
    assert run(cache, range(64)) == 63


def test_many_identities_come_and_go_without_a_trace() -> None:
    cache = PrefixCache(8)
    for i in range(200):
        run(cache, range(32), CacheIdentity.local(f"m{i}"))
    stats = cache.stats()
    assert stats.identities == stats.nodes == 4 and cache.check() == []
