"""Accounts: what each tenant has, what shares promise, and that all parts make the whole."""

from __future__ import annotations

import dataclasses

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import InvalidConfig, OutOfBlocks
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.table import BlockTable

SIZE = 4
MODEL = CacheIdentity.local("m", SIZE)


def of(tenant: str | None, salt: str | None = None) -> CacheIdentity:
    return dataclasses.replace(MODEL, namespace=Namespace(tenant, salt))


def begin(
    cache: PrefixCache, tenant: str | None, ids: list[int], batch: bool = False
) -> BlockTable:
    """Open a sequence, compute and publish it."""
    table = cache.open(cache.acquire(of(tenant), bytes_of(ids), batch=batch))
    missing = len(ids) - table.num_tokens
    table.reserve(missing)
    table.commit(missing)
    table.publish(bytes_of(ids))
    assert cache.check() == []
    return table


def bytes_of(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(4) for i in ids)


def put(
    cache: PrefixCache, tenant: str | None, start: int, num_blocks: int, batch: bool = False
) -> list[int]:
    """A whole sequence of ``num_blocks`` blocks that shares nothing with others; return its ids."""
    ids = list(range(start, start + num_blocks * SIZE))
    begin(cache, tenant, ids, batch).release()
    return ids


def resident(cache: PrefixCache, tenant: str | None, ids: list[int]) -> int:
    return cache.lookup(of(tenant), bytes_of([*ids, 0])) // SIZE


def test_accounts_count_what_each_tenant_has_asked_for_and_lost() -> None:
    cache = PrefixCache(8, SIZE)
    ids = put(cache, "a", 100, 3)
    cache.acquire(of("a"), bytes_of([*ids, 1])).release()
    cache.acquire(of("b"), bytes_of([*ids, 1])).release()
    put(cache, "b", 200, 6)
    a, b = cache.account("a"), cache.account("b")
    assert (a.queries, a.queried_tokens, a.hit_tokens) == (2, 12 + 13, 12)
    assert (b.queries, b.queried_tokens, b.hit_tokens) == (2, 13 + 24, 0), "nothing of a's"
    assert (a.blocks, a.published_blocks, a.evicted_suffered, a.evicted_caused) == (2, 3, 1, 0)
    assert (b.blocks, b.published_blocks, b.evicted_suffered, b.evicted_caused) == (6, 6, 0, 1)
    assert a.blocks + b.blocks == cache.cached_blocks and cache.check() == []


def test_a_tenants_salts_share_one_account() -> None:
    cache = PrefixCache(8, SIZE)
    put(cache, "a", 100, 2)
    table = cache.open(cache.acquire(of("a", "salt"), bytes_of([*range(100, 108)])))
    assert table.cached_tokens == 0
    table.reserve(8)
    table.commit(8)
    table.publish(bytes_of([*range(100, 108)]))
    assert cache.account("a").blocks == 4 and len(cache.accounts) == 1


def test_a_canceled_lease_is_taken_out_of_its_account_too() -> None:
    cache = PrefixCache(8, SIZE)
    ids = put(cache, "a", 100, 2)
    cache.acquire(of("a"), bytes_of([*ids, 1])).cancel()
    account = cache.account("a")
    assert (account.queries, account.queried_tokens, account.hit_tokens) == (1, 8, 0)
    cache.clear_counters()
    assert cache.account("a").queried_tokens == 0 and cache.check() == []


def test_one_tenant_cannot_flood_out_another_whose_quota_it_exceeds_itself() -> None:
    """EVICT-6: quota 25 %; a flood as tenant 1 leaves the 10 % of tenant 2; usages add up."""
    cache = PrefixCache(40, SIZE)
    cache.set_share("1", quota=10)
    quiet = put(cache, "2", 5000, 4)
    for i in range(50):
        put(cache, "1", 100 * i + 10_000, 4)
        assert resident(cache, "2", quiet) == 4
        assert cache.account("1").blocks + cache.account("2").blocks == cache.cached_blocks
    assert cache.account("1").blocks == 36, "what nobody else wants is not left empty"
    put(cache, "2", 90_000, 20)
    assert cache.account("2").blocks == 24 and cache.account("2").evicted_suffered == 0


def test_what_a_floor_promises_survives_any_flood_and_goes_by_the_owners_own_work_only() -> None:
    cache = PrefixCache(20, SIZE)
    cache.set_share("quiet", floor=5)
    kept = put(cache, "quiet", 100, 5)
    for i in range(20):
        put(cache, "loud", 1000 + 100 * i, 6)
    assert resident(cache, "quiet", kept) == 5
    assert cache.available_to("loud") == 15 and cache.available_to("quiet") == 20
    with pytest.raises(OutOfBlocks, match="need 16 blocks: 0 free, 15 evictable"):
        cache.open(cache.acquire(of("loud"), b"")).reserve(16 * SIZE)
    assert cache.account("quiet").evicted_suffered == 0
    own = begin(cache, "quiet", list(range(7000, 7000 + 20 * SIZE)))
    assert resident(cache, "quiet", kept) == 0 and own.num_blocks == 20
    assert cache.account("quiet").evicted_suffered == 5


def test_the_owner_takes_from_others_before_it_falls_below_its_own_floor() -> None:
    cache = PrefixCache(8, SIZE)
    cache.set_share("a", floor=4)
    old = put(cache, "a", 100, 3)
    put(cache, "b", 200, 5)
    put(cache, "a", 300, 2)
    assert resident(cache, "a", old) == 3 and cache.account("b").blocks == 3


def test_a_floor_holds_for_blocks_in_use_as_well() -> None:
    """What is in use counts towards the floor, so more than it may go of what is not."""
    cache = PrefixCache(8, SIZE)
    cache.set_share("a", floor=4)
    put(cache, "a", 200, 3)
    with begin(cache, "a", list(range(100, 100 + 3 * SIZE))):
        assert cache.account("a").blocks == 6 and cache.available_to("b") == 2 + 2
        put(cache, "b", 900, 4)
        assert cache.account("a").blocks == 4 and cache.account("a").evictable == 1
        assert cache.available_to("b") == 4, "its own"


def test_floors_that_together_exceed_the_pool_are_refused_and_change_nothing() -> None:
    cache = PrefixCache(10, SIZE)
    cache.set_share("a", quota=8, floor=6)
    with pytest.raises(InvalidConfig, match="floor of 5 blocks for tenant 'b' and 6 for the other"):
        cache.set_share("b", floor=5)
    with pytest.raises(InvalidConfig, match="0 <= floor <= quota"):
        cache.set_share("a", quota=3, floor=4)
    with pytest.raises(InvalidConfig, match="0 <= floor"):
        cache.set_share("a", floor=-1)
    assert (cache.account("a").quota, cache.account("a").floor) == (8, 6)
    cache.set_share("b", floor=4)
    assert cache.accounts.ceiling("a") == 6 and cache.accounts.ceiling("c") == 0
    cache.set_share("a")
    assert (cache.account("a").quota, cache.account("a").floor) == (None, 0)
    cache.set_share("b", floor=10)


def test_shares_of_several_change_together_or_not_at_all() -> None:
    cache = PrefixCache(10, SIZE)
    cache.set_shares({"a": (None, 8), "b": (9, 2)})
    cache.set_shares({"a": (None, 2), "b": (None, 8)})  # one grows by what the other gives up
    wrong: list[dict[str | None, tuple[int | None, int]]] = [
        {"a": (4, 1), "b": (None, 10)},
        {"c": (None, 0), "a": (1, 2)},
    ]
    for shares in wrong:
        with pytest.raises(InvalidConfig):
            cache.set_shares(shares)
        kept = [(cache.account(name).quota, cache.account(name).floor) for name in "abc"]
        assert kept == [(None, 2), (None, 8), (None, 0)]


def test_a_share_that_changes_takes_effect_on_what_is_there_already() -> None:
    cache = PrefixCache(8, SIZE)
    kept = put(cache, "a", 100, 4)
    put(cache, "b", 200, 4)
    cache.set_share("a", floor=4)
    assert cache.available_to("b") == 4 and cache.check() == []
    put(cache, "b", 300, 2)
    assert resident(cache, "a", kept) == 4
    cache.set_share("a", floor=1)
    put(cache, "b", 400, 2)
    assert resident(cache, "a", kept) == 2, "it is the oldest again"
    cache.set_share("b", quota=0)
    put(cache, "a", 500, 4)
    assert resident(cache, "a", kept) == 2 and cache.account("b").blocks == 2


def test_shares_and_counters_outlive_a_reset() -> None:
    cache = PrefixCache(8, SIZE)
    cache.set_share("a", quota=4, floor=2)
    put(cache, "a", 100, 6)
    put(cache, "b", 200, 4)
    assert cache.reset() == 8
    assert cache.check() == [] and cache.account("a").blocks == 0
    assert cache.account("a").quota == 4 and cache.account("a").queried_tokens == 24
    kept = put(cache, "a", 100, 2)
    put(cache, "b", 200, 4)
    put(cache, "b", 300, 6)
    assert resident(cache, "a", kept) == 2 and cache.check() == []


def test_a_batch_sweep_leaves_the_conversation_alone() -> None:
    """EVICT-2: a long chat, then many documents that nobody waits for, then the next turn."""
    cache = PrefixCache(100, SIZE)
    chat = put(cache, "a", 10_000, 60)
    for i in range(32):
        put(cache, "a", 20_000 + 1000 * i, 30, batch=True)
    assert resident(cache, "a", chat) == 60
    for i in range(4):
        put(cache, "a", 60_000 + 1000 * i, 30)
    assert resident(cache, "a", chat) == 0, "other people's chats may"


def test_batch_work_makes_a_chats_blocks_neither_older_nor_younger() -> None:
    cache = PrefixCache(12, SIZE)
    first, second = put(cache, "a", 100, 4), put(cache, "a", 200, 4)
    put(cache, "a", 300, 4)
    cache.acquire(of("a"), bytes_of([*first, 0]), batch=True).release()
    put(cache, "a", 400, 4)
    assert resident(cache, "a", first) == 0 and resident(cache, "a", second) == 4


def test_what_batch_work_puts_behind_a_chat_goes_first_and_the_chat_stays() -> None:
    cache = PrefixCache(12, SIZE)
    chat = put(cache, "a", 100, 4)
    longer = [*chat, *range(500, 516)]
    begin(cache, "a", longer, batch=True).release()
    assert cache.stats().nodes == 1, "one edge, of two ages"
    put(cache, "a", 200, 4)
    put(cache, "a", 300, 3)
    assert resident(cache, "a", longer) == 5
    put(cache, "a", 400, 1)
    assert resident(cache, "a", chat) == 4 and resident(cache, "a", longer) == 4


def test_a_chat_that_uses_what_batch_work_has_left_makes_it_its_own() -> None:
    cache = PrefixCache(12, SIZE)
    put(cache, "a", 100, 4)
    document = put(cache, "a", 500, 4, batch=True)
    with begin(cache, "a", document).fork() as twin:
        assert not twin.batch
    put(cache, "a", 300, 8)
    assert resident(cache, "a", document) == 4


def test_check_notices_accounts_that_do_not_add_up() -> None:
    cache = PrefixCache(8, SIZE)
    cache.set_share("a", quota=1, floor=1)
    put(cache, "a", 100, 3)
    put(cache, "b", 200, 3)
    account = cache.accounts.of("a")
    for name in ("blocks", "evictable", "protected", "suffered", "queried", "published"):
        setattr(account, name, getattr(account, name) + 1)
        assert cache.check() != [], name
        setattr(account, name, getattr(account, name) - 1)
    account.excess = 0
    assert any("over its quota" in line for line in cache.check())
    account.excess = 2
    cache.accounts.of("b").leaves.promised = 1 << 70
    assert any("in line" in line for line in cache.check())
