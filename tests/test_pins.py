"""Pins: what owners keep resident, at whose cost, until when; and that none of it leaks."""

from __future__ import annotations

import random

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import CacheBusy, OutOfBlocks
from radixkv.tokens import encode
from tests.cache_runs import Clock, flood, fresh, identity, run

ME = identity("me")


def found(cache: PrefixCache, ids: list[int]) -> int:
    return cache.lookup(ME, encode(ids), max_cached=len(ids))


def test_a_pinned_prompt_survives_a_flood_and_can_be_let_go() -> None:
    """EVICT-3: pin, flood, full hit; listed; unpinned, it goes."""
    cache = PrefixCache(32, 4)
    text = fresh(22)
    run(cache, ME, text)
    pin = cache.pins.pin(ME, encode(text), owner="me", name="system")
    assert (pin.granted_tokens, pin.num_blocks, pin.short) == (22, 6, None)
    assert cache.pins.list() == cache.pins.list("me") == [pin]
    assert cache.pins.num_blocks == cache.pins.used_blocks("me") == 6
    flood(cache, ME, 64)
    assert found(cache, text) == 22 and run(cache, ME, text) == 21
    assert cache.account("me").pinned_blocks == 6
    assert cache.check() == []
    assert cache.pins.unpin(pin.id) and not cache.pins.unpin(pin.id)
    assert cache.pins.list() == [] and cache.pins.num_blocks == 0
    assert cache.account("me").pinned_blocks == 0
    flood(cache, ME, 64)
    assert found(cache, text) == 0
    assert cache.available == cache.num_blocks and cache.check() == []


def test_what_goes_beyond_the_budget_is_refused_with_a_reason() -> None:
    """EVICT-3: a prefix of it is granted, and how much that is."""
    cache = PrefixCache(64, 4)
    text = fresh(40)
    run(cache, ME, text)
    cache.pins.set_budget("me", 6)
    pin = cache.pins.pin(ME, encode(text), owner="me")
    assert (pin.granted_tokens, pin.num_blocks, pin.short) == (24, 6, "budget")
    assert pin.num_tokens == 40 and cache.pins.budget("me") == (6, 6)
    other = fresh(8)
    run(cache, ME, other)
    none = cache.pins.pin(ME, encode(other), owner="me")
    assert (none.granted_tokens, none.num_blocks, none.short) == (0, 0, "budget")
    assert not cache.pins.unpin(none.id) and len(cache.pins) == 1
    flood(cache, ME, 128)
    assert found(cache, text) == 24
    cache.pins.set_budget("me", 100)
    flood(cache, ME, 1)
    run(cache, ME, text)
    more = cache.pins.pin(ME, encode(text), owner="me")  # the same, with room now
    assert (more.id, more.granted_tokens, more.short) == (pin.id, 40, None)
    cache.pins.set_budget("me", None)
    assert cache.pins.budget("me") == (16, 10)
    with pytest.raises(ValueError, match="-1"):
        cache.pins.set_budget("me", -1)


def test_a_smaller_budget_takes_nothing_that_was_granted() -> None:
    cache = PrefixCache(64, 4)
    text = fresh(32)
    run(cache, ME, text[:16])
    first = cache.pins.pin(ME, encode(text), owner="me")
    assert (first.granted_tokens, first.short) == (16, "not_resident")
    cache.pins.set_budget("me", 2)
    run(cache, ME, text)
    again = cache.pins.pin(ME, encode(text), owner="me")
    assert (again.granted_tokens, again.short) == (16, "budget")
    cache.pins.set_budget("me", 5)
    assert cache.pins.pin(ME, encode(text), owner="me").granted_tokens == 20
    assert cache.check() == []


def test_the_overlap_of_two_owners_stays_until_both_have_gone() -> None:
    """EVICT-4: counted by block and owner."""
    cache = PrefixCache(32, 4)
    stem = fresh(8)
    mine, yours = [*stem, *fresh(8)], [*stem, *fresh(4)]
    run(cache, ME, mine)
    run(cache, ME, yours)
    a = cache.pins.pin(ME, encode(mine), owner="a")
    b = cache.pins.pin(ME, encode(yours), owner="b")
    assert cache.pins.num_blocks == 5
    assert (cache.pins.used_blocks("a"), cache.pins.used_blocks("b")) == (4, 3)
    assert cache.account("me").pinned_blocks == 5
    assert not cache.pins.unpin(a.id, owner="b")
    assert cache.pins.unpin(a.id, owner="a")
    flood(cache, ME, 64)
    assert found(cache, mine) == 8 and found(cache, yours) == 12
    assert cache.check() == []
    assert cache.pins.unpin_owner("b") == 1 and cache.pins.unpin_owner("b") == 0
    assert b.id not in {pin.id for pin in cache.pins.list()}
    flood(cache, ME, 64)
    assert found(cache, yours) == 0


def test_what_two_pins_of_one_owner_share_costs_once() -> None:
    cache = PrefixCache(64, 4)
    text = fresh(32)
    run(cache, ME, text)
    cache.pins.set_budget("me", 8)
    assert cache.pins.pin(ME, encode(text[:24]), owner="me").short is None
    assert cache.pins.pin(ME, encode(text), owner="me").short is None
    assert cache.pins.budget("me") == (8, 8)
    assert cache.check() == []


def test_the_same_again_is_the_same_pin_and_never_shorter() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    text = encode(fresh(16))
    run(cache, ME, list(range(16)))
    tokens = encode(range(16))
    first = cache.pins.pin(ME, tokens, owner="me", ttl_s=300)
    clock.sleep(100)
    again = cache.pins.pin(ME, tokens, owner="me", ttl_s=300)
    assert again.id == first.id and again.expires_at == clock.now + 300
    assert (again.created_at, cache.pins.num_blocks, len(cache.pins)) == (first.created_at, 4, 1)
    hour = cache.pins.pin(ME, tokens, owner="me", ttl_s=3600)
    assert (hour.id, hour.ttl_s, hour.expires_at) == (first.id, 3600, clock.now + 3600)
    assert cache.pins.pin(ME, tokens, owner="me", ttl_s=300).ttl_s == 3600
    ever = cache.pins.pin(ME, tokens, owner="me")
    assert (ever.ttl_s, ever.expires_at) == (None, None)
    assert cache.pins.pin(ME, tokens, owner="me", ttl_s=300).expires_at is None
    others = [
        cache.pins.pin(ME, tokens, owner="you"),
        cache.pins.pin(ME, tokens, owner="me", name="n"),
        cache.pins.pin(ME, tokens[:32], owner="me"),
    ]
    assert len({first.id, *(pin.id for pin in others)}) == 4
    assert cache.pins.pin(identity("me", "salt"), tokens, owner="me").granted_tokens == 0
    assert cache.pins.pin(ME, text, owner="me").short == "not_resident"
    assert cache.check() == []


def test_a_pin_expires_unless_it_is_used() -> None:
    clock = Clock()
    cache = PrefixCache(32, 4, clock=clock)
    text, other = fresh(16), fresh(16)
    run(cache, ME, text)
    run(cache, ME, other)
    pin = cache.pins.pin(ME, encode(text), owner="me", ttl_s=300)
    cache.pins.pin(ME, encode(other), owner="me", ttl_s=300)
    for _ in range(4):
        clock.sleep(200)
        assert run(cache, ME, text) == 15  # the very same: all but the last token is all
    (left,) = cache.pins.list()
    assert (left.id, left.expires_at) == (pin.id, clock.now + 300)
    clock.sleep(200)
    run(cache, ME, text[:12])  # found less than it holds
    run(cache, ME, [*text[:12], *fresh(9)])
    clock.sleep(99)
    assert len(cache.pins.list()) == 1
    clock.sleep(1)
    assert [gone.id for gone in cache.pins.expire()] == [pin.id]
    assert cache.pins.num_blocks == 0 and cache.check() == []


def test_nobody_has_to_call_expire() -> None:
    clock = Clock()
    cache = PrefixCache(32, 4, clock=clock)
    text = fresh(16)
    run(cache, ME, text)
    cache.pins.pin(ME, encode(text), owner="me", ttl_s=1)
    assert cache.available == 28
    clock.sleep(2)
    cache.acquire(identity("you"), encode(fresh(3))).release()
    assert cache.available == 32 and len(cache.pins) == 0


def test_a_refresh_begins_the_time_anew() -> None:
    clock = Clock()
    cache = PrefixCache(32, 4, clock=clock)
    run(cache, ME, list(range(16)))
    pin = cache.pins.pin(ME, encode(range(16)), owner="me", ttl_s=10)
    clock.sleep(9)
    again = cache.pins.refresh(pin.id)
    assert again is not None and again.expires_at == clock.now + 10
    shorter = cache.pins.refresh(pin.id, 2)
    assert shorter is not None and (shorter.ttl_s, shorter.expires_at) == (2, clock.now + 2)
    assert cache.check() == []
    clock.sleep(3)
    assert cache.pins.refresh(pin.id) is None
    with pytest.raises(ValueError, match="0"):
        cache.pins.pin(ME, b"", owner="me", ttl_s=0)


def test_what_expires_was_not_used_by_expiring() -> None:
    """It has waited all the time, so it goes before what was used meanwhile."""
    clock = Clock()
    cache = PrefixCache(16, 4, clock=clock)
    text = fresh(16)
    run(cache, ME, text)
    cache.pins.pin(ME, encode(text), owner="me", ttl_s=1)
    live = fresh(32)
    run(cache, ME, live)
    clock.sleep(2)
    assert cache.pins.expire()
    flood(cache, ME, 5)
    assert found(cache, live) == 32 and found(cache, text) < 16


@pytest.mark.parametrize("lowered", [False, True])
def test_a_tail_that_becomes_a_whole_block_costs_no_pin_its_hold_where_the_budget_is_used_up(
    lowered: bool,
) -> None:
    """Two pins are on one tail, or the budget was lowered since: the block that takes the tail's
    place is no more than there was. A pin that holds nothing could never be let go again."""
    clock = Clock()
    cache = PrefixCache(32, 4, clock=clock)
    cache.pins.set_budget("me", 1)
    text = fresh(3)
    run(cache, ME, text)
    for name in ("one", "two"):
        cache.pins.pin(ME, encode(text), owner="me", name=name, ttl_s=60.0)
    if lowered:
        cache.pins.set_budget("me", 0)
    run(cache, ME, text + fresh(2))
    assert cache.check() == []
    assert [pin.granted_tokens for pin in cache.pins.list()] == [3, 3]
    assert cache.pins.used_blocks("me") == 1 and cache.check() == []
    clock.sleep(61.0)
    assert len(cache.pins.expire()) == 2 and cache.check() == []


def test_a_tail_stays_pinned_when_a_longer_block_takes_its_place() -> None:
    """The conversation goes on, and what was pinned of it is still there after a flood."""
    cache = PrefixCache(32, 4)
    text = fresh(10)
    run(cache, ME, text)
    pin = cache.pins.pin(ME, encode(text), owner="me")
    assert pin.granted_tokens == 10 and pin.num_blocks == 3
    run(cache, ME, [*text, *fresh(9)])
    flood(cache, ME, 64)
    assert found(cache, text) == 10
    assert cache.pins.num_blocks == 3 and cache.check() == []
    cache.pins.unpin(pin.id)
    assert cache.available == 32 and cache.check() == []


def test_a_pin_may_end_inside_a_block() -> None:
    cache = PrefixCache(32, 4)
    text = fresh(16)
    run(cache, ME, text)
    pin = cache.pins.pin(ME, encode(text[:6]), owner="me")
    assert (pin.granted_tokens, pin.num_blocks) == (6, 2)
    flood(cache, ME, 64)
    assert found(cache, text) == 8 and cache.check() == []


def test_a_public_prefix_may_be_pinned_by_who_goes_on_from_it() -> None:
    """The blocks are the public account's, the budget is the owner's."""
    for n in (8, 10):
        cache = PrefixCache(32, 4)
        prefix, public = fresh(n), identity(None)
        border = cache.declare_public(public, encode(prefix))
        run(cache, public, prefix)
        text = [*prefix, *fresh(6)]
        run(cache, ME, text)
        pin = cache.pins.pin(ME, encode(text), owner="me")
        assert (pin.granted_tokens, pin.num_blocks) == (n + 6, -(-(n + 6) // 4))
        assert cache.account(None).pinned_blocks == 2
        assert cache.account("me").pinned_blocks == pin.num_blocks - 2
        cache.pins.pin(ME, encode(prefix), owner="you")
        assert cache.check() == []
        flood(cache, identity("you"), 64)
        assert found(cache, text) == n + 6
        cache.withdraw_public(border)
        cache.pins.pin(ME, encode(text), owner="me")  # what it has is not to be found any more
        assert cache.check() == [] and len(cache.pins) == 2
        cache.pins.unpin_owner("me")
        cache.pins.unpin_owner("you")
        assert cache.available == 32 and cache.check() == []


def test_a_reset_takes_pins_but_no_running_sequence() -> None:
    cache = PrefixCache(32, 4)
    text = fresh(16)
    run(cache, ME, text)
    cache.pins.pin(ME, encode(text), owner="me")
    lease = cache.acquire(ME, encode(text))
    with pytest.raises(CacheBusy, match="0 sequences and 1 leases"):
        cache.reset()
    assert len(cache.pins) == 1  # a reset that was refused has taken nothing
    lease.release()
    assert cache.reset() == 4
    assert (len(cache.pins), cache.pins.dropped, cache.pins.num_blocks) == (0, 1, 0)
    assert cache.free_blocks == 32 and cache.check() == []
    run(cache, ME, text)
    assert cache.pins.pin(ME, encode(text), owner="me").granted_tokens == 16


def test_pinning_counts_neither_as_query_nor_as_hit() -> None:
    cache = PrefixCache(32, 4)
    text = fresh(16)
    run(cache, ME, text)
    before = (cache.stats().queries, cache.stats().hit_tokens, cache.account("me").queries)
    cache.pins.unpin(cache.pins.pin(ME, encode(text), owner="me").id)
    cache.pins.pin(ME, encode(fresh(4)), owner="me")
    after = (cache.stats().queries, cache.stats().hit_tokens, cache.account("me").queries)
    assert after == before


def test_pinned_blocks_are_room_for_nobody() -> None:
    cache = PrefixCache(8, 4)
    text = fresh(24)
    run(cache, ME, text)
    cache.pins.set_budget("me", 6)
    cache.pins.pin(ME, encode(text), owner="me")
    with (
        cache.open(cache.acquire(ME, encode(fresh(12)))) as table,
        pytest.raises(OutOfBlocks, match="need 3 blocks: 2 free"),
    ):
        table.reserve(12)


def test_ids_say_nothing_of_other_pins() -> None:
    cache = PrefixCache(32, 4)
    run(cache, ME, list(range(8)))
    ids = [cache.pins.pin(ME, encode(range(8)), owner=f"o{i}").id for i in range(20)]
    assert len(set(ids)) == 20 and ids != sorted(ids)
    assert all(id.startswith("pin-") and len(id) == 20 for id in ids)


def test_a_queue_of_pins_that_were_let_go_does_not_grow() -> None:
    cache = PrefixCache(32, 4)
    run(cache, ME, list(range(8)))
    for _ in range(1000):
        cache.pins.unpin(cache.pins.pin(ME, encode(range(8)), owner="me", ttl_s=1e6).id)
    assert len(cache.pins._queue) < 100


@pytest.mark.parametrize("seed", range(25))
def test_a_long_random_life_with_pins_keeps_the_books_right(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    size = rng.choice([1, 2, 4])
    cache = PrefixCache(rng.randint(12, 40), size, clock=clock)
    who = [identity(tenant, block_size=size) for tenant in ("a", "b")]
    cache.pins.set_budget("a", rng.randint(0, 6))
    texts: list[list[int]] = [[0]]
    for _ in range(200):
        mine, owner = rng.choice(who), rng.choice(["a", "b", "c"])
        old = rng.choice(texts)
        text = old[: rng.randrange(len(old) + 1)] + [rng.randrange(3) for _ in range(6)]
        texts = [*texts[-8:], text[: 6 * size]]
        tokens = encode(texts[-1])
        match rng.randrange(8):
            case 0 | 1 | 2:
                if cache.available * size > len(texts[-1]) + size:
                    run(cache, mine, texts[-1], tail=rng.random() < 0.5)
            case 3:
                ttl_s = rng.choice([None, 1.0, 5.0])
                pin = cache.pins.pin(mine, tokens, owner=owner, ttl_s=ttl_s)
                had = cache.lookup(mine, tokens, max_cached=len(texts[-1]))
                assert pin.granted_tokens <= had and (pin.short or pin.granted_tokens == had)
            case 4:
                clock.sleep(rng.random() * 2)
            case 5 if len(cache.pins):
                pin = rng.choice(cache.pins.list())
                cache.pins.refresh(pin.id)
            case 6 if len(cache.pins) > 3:
                cache.pins.unpin(rng.choice(cache.pins.list()).id)
            case 7 if rng.random() < 0.1:
                cache.reset()
        assert cache.check() == []
        assert cache.pins.used_blocks("a") <= cache.pins.budget("a")[0]
        cache.pins.expire()
        for pin in cache.pins.list():
            resident = cache.lookup(pin.identity, pin.tokens, max_cached=pin.num_tokens)
            assert resident >= pin.granted_tokens, "what is pinned has gone"
    for owner in ("a", "b", "c"):
        cache.pins.unpin_owner(owner)
    assert cache.available == cache.num_blocks and cache.check() == []
