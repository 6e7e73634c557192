"""Public prefixes: shared to the token by all tenants, and nothing behind them is."""

from __future__ import annotations

import dataclasses

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import IdentityMismatch
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.public import PublicPrefixes
from radixkv.table import BlockTable
from radixkv.tokens import encode

SIZE = 4
MODEL = CacheIdentity.local("m", SIZE)
SYSTEM = list(range(100, 110))  # two blocks and a half


def of(tenant: str | None, salt: str | None = None, size: int = SIZE) -> CacheIdentity:
    model = CacheIdentity.local("m", size)
    return dataclasses.replace(model, namespace=Namespace(tenant, salt))


def go(cache: PrefixCache, tenant: str | None, ids: list[int], tail: bool = False) -> BlockTable:
    """Run a sequence as an engine does: a step ends at the border, and each is published."""
    table = cache.open(cache.acquire(of(tenant, size=cache.block_size), encode(ids)))
    while table.num_tokens < len(ids):
        n = table.tokens_to_border or len(ids) - table.num_tokens
        table.reserve(n)
        table.commit(n)
        table.publish(encode(ids), tail=tail)
        assert cache.check() == []
    return table


def found(cache: PrefixCache, tenant: str | None, ids: list[int], salt: str | None = None) -> int:
    return cache.lookup(of(tenant, salt, cache.block_size), encode([*ids, 0]))


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_a_hit_of_another_tenant_ends_exactly_at_the_border(size: int, length: int) -> None:
    """SECURITY-4: the same public system prompt and the same private text, two tenants."""
    cache = PrefixCache(256, size)
    public = list(range(100, 100 + length))
    cache.declare_public(of(None, size=size), encode(public))
    ids = [*public, *range(7000, 7040)]
    go(cache, "a", ids, tail=True).release()
    assert found(cache, "b", ids) == length
    assert found(cache, "a", ids) == len(ids), "and its own is found whole"
    assert found(cache, "a", ids, salt="s") == length
    assert found(cache, None, ids) == length, "and nothing private in the public tree"
    table = go(cache, "b", ids, tail=True)
    assert table.cached_tokens == length
    table.release()
    assert found(cache, "b", ids) == len(ids) == found(cache, "a", ids)
    assert cache.check() == [] and cache.available == 256


def test_the_part_before_the_border_is_kept_once_for_all() -> None:
    cache = PrefixCache(64, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    for tenant in "abcdefgh":
        go(cache, tenant, [*SYSTEM, *range(5000, 5006)]).release()
    assert cache.account(None).blocks == 3, "with the tail that ends at the border"
    assert all(cache.account(tenant).blocks == 2 for tenant in "abcdefgh")
    assert cache.account("h").hit_tokens == 10 and cache.account(None).queries == 0


def test_only_who_has_all_of_the_prefix_shares_it() -> None:
    cache = PrefixCache(64, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    go(cache, "a", [*SYSTEM[:9], 1, 2, 3]).release()
    assert found(cache, "b", [*SYSTEM[:9], 1, 2, 3]) == 0
    go(cache, "a", SYSTEM[:8]).release()
    assert found(cache, "b", SYSTEM[:8]) == 0 and cache.account(None).blocks == 0


def test_the_longest_of_several_prefixes_decides_where_the_border_is() -> None:
    cache = PrefixCache(64, SIZE)
    longer = [*SYSTEM, *range(200, 207)]
    cache.declare_public(MODEL, encode(longer))
    cache.declare_public(MODEL, encode(SYSTEM))
    go(cache, "a", [*longer, 1, 2, 3, 4]).release()
    assert found(cache, "b", [*longer, 1, 2, 3, 4]) == 17
    assert found(cache, "b", [*longer[:15], 7]) == 10, "the shorter one, found in the longer"
    go(cache, "a", [*longer[:15], 7, 7, 7]).release()
    assert found(cache, "b", [*longer[:15], 7, 7, 7]) == 10


def test_without_a_step_that_ends_at_the_border_whole_blocks_are_shared_and_no_more() -> None:
    cache = PrefixCache(64, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    ids = [*SYSTEM, *range(20)]
    table = cache.open(cache.acquire(of("a"), encode(ids)))
    assert table.tokens_to_border == 10
    table.reserve(30)
    table.commit(30)
    assert table.tokens_to_border is None
    table.publish(encode(ids))
    assert found(cache, "b", ids) == 8 and found(cache, "a", ids) == 28
    go(cache, None, SYSTEM).release()
    assert found(cache, "b", ids) == 8, "the public identity itself has no border"
    go(cache, None, SYSTEM, tail=True).release()
    assert found(cache, "b", ids) == 10 and cache.check() == []


def test_declaring_what_a_tenant_has_already_takes_nothing_from_it() -> None:
    cache = PrefixCache(64, SIZE)
    ids = [*SYSTEM, *range(20)]
    go(cache, "a", ids).release()
    cache.declare_public(MODEL, encode(SYSTEM))
    assert found(cache, "a", ids) == 28 and found(cache, "b", ids) == 0
    table = go(cache, "a", [*ids, 5, 6, 7])
    assert table.cached_tokens == 28
    table.release()
    assert found(cache, "b", ids) == 0, "it went on where it was"
    go(cache, "b", ids).release()
    assert found(cache, "c", ids) == 10


def test_what_is_held_behind_the_border_holds_what_is_before_it() -> None:
    cache = PrefixCache(12, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    ids = [*SYSTEM, *range(20, 26)]
    go(cache, "a", ids).release()
    with cache.acquire(of("a"), encode([*ids, 1])) as lease:
        assert lease.cached_tokens == 16 and cache.account(None).evictable == 1
        go(cache, "c", list(range(900, 932))).release()
        assert cache.account(None).blocks == 2 and cache.check() == []
        with cache.acquire(of("a"), encode([*ids, 1])):
            assert cache.check() == []
    assert cache.account(None).evictable == 2 and cache.check() == []


def test_what_goes_on_from_a_prefix_goes_before_the_prefix_does() -> None:
    """EVICT-1, across the border."""
    cache = PrefixCache(8, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM[:8]))
    ids = [*SYSTEM[:8], *range(20, 28)]
    for tenant in ("a", "b", "c"):
        go(cache, tenant, ids).release()
    for blocks in range(1, 7):
        with cache.open(cache.acquire(of("d"), b"")) as table:
            table.reserve(blocks * SIZE)
            assert cache.account(None).blocks == 2
    with cache.open(cache.acquire(of("d"), b"")) as table:
        table.reserve(7 * SIZE)
        assert cache.account(None).blocks == 1


def test_private_parts_under_a_floor_outlast_the_prefix_and_are_found_when_it_is_back() -> None:
    cache = PrefixCache(10, SIZE)
    cache.set_share("a", floor=3)
    cache.declare_public(MODEL, encode(SYSTEM[:8]))
    ids = [*SYSTEM[:8], *range(20, 32)]
    go(cache, "a", ids).release()
    go(cache, "b", list(range(900, 928))).release()
    assert cache.account(None).blocks == 0 and cache.account("a").blocks == 3
    assert found(cache, "a", ids) == 0 and cache.check() == []
    go(cache, "c", SYSTEM[:8] + [7]).release()
    assert found(cache, "a", ids) == 20 and found(cache, "b", ids) == 8


def test_a_withdrawn_prefix_is_found_by_nobody_and_leaves_nothing_behind() -> None:
    cache = PrefixCache(64, SIZE)
    prefix = cache.declare_public(MODEL, encode(SYSTEM))
    ids = [*SYSTEM, *range(20)]
    go(cache, "a", ids).release()
    used = go(cache, "b", ids)
    assert cache.public_prefixes() == (prefix,)
    cache.withdraw_public(prefix)
    cache.withdraw_public(prefix)
    assert prefix.withdrawn and cache.public_prefixes() == () and cache.check() == []
    assert found(cache, "a", ids) == found(cache, "b", ids) == found(cache, "c", ids) == 0
    assert cache.account("a").blocks == 0 and cache.account("b").blocks == 5, "those in use"
    longer = [*ids, *range(50, 60)]
    used.reserve(10)
    used.commit(10)
    used.publish(encode(longer), tail=True)
    assert cache.account("b").blocks == 5 and cache.check() == []
    used.release()
    assert cache.account("b").blocks == 0 and cache.check() == []
    assert found(cache, None, SYSTEM) == 10, "the public identity's own"
    again = cache.declare_public(MODEL, encode(SYSTEM))
    assert again is not prefix and found(cache, "a", ids) == 10 and cache.check() == []


def test_what_a_withdrawal_takes_is_counted_and_explained_as_evicted() -> None:
    """DIAG-3: it was there, and it went; whoever declared the prefix has caused it."""
    cache = PrefixCache(64, SIZE)
    prefix = cache.declare_public(MODEL, encode(SYSTEM))
    ids = [*SYSTEM, *range(20)]
    go(cache, "a", ids).release()
    used = go(cache, "b", ids)
    had = cache.account("a").blocks
    assert had > 0 and cache.stats().evicted_blocks == 0
    cache.withdraw_public(prefix)
    assert cache.stats().evicted_blocks == cache.account("a").evicted_suffered == had
    assert cache.account(None).evicted_caused == had
    assert cache.account("a").evicted_caused == cache.account("b").evicted_suffered == 0
    used.release()
    assert cache.account("b").evicted_suffered > 0 and cache.check() == []
    for tenant in ("a", "b"):
        assert dict(cache.explain(of(tenant), encode(ids)).reasons)["evicted"] >= 28
    nobody = cache.explain(of("c"), encode(ids))
    assert dict(nobody.reasons) == {"first_seen": 30}


def test_a_sequence_cut_back_before_its_border_shares_nothing_that_is_not_public() -> None:
    cache = PrefixCache(64, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    table = go(cache, "a", [*SYSTEM, 1, 2, 3])
    table.truncate(6)
    secret = [*SYSTEM[:6], *range(60, 70)]
    table.reserve(10)
    table.commit(10)
    table.publish(encode(secret), tail=True)
    table.release()
    assert found(cache, None, secret) == 6 and found(cache, "b", secret) == 0
    assert cache.check() == []


def test_a_long_prefix_may_be_published_in_chunks_and_by_forks() -> None:
    cache = PrefixCache(64, SIZE)
    cache.declare_public(MODEL, encode(SYSTEM))
    ids = [*SYSTEM, *range(20, 30)]
    table = cache.open(cache.acquire(of("a"), encode(ids)))
    twins = []
    for n in (3, 2, 5, 1, 1, 8):
        table.reserve(n)
        table.commit(n)
        table.publish(encode(ids[: table.num_tokens]), tail=True)
        twins.append(table.fork())
        assert cache.check() == []
    for twin in twins:
        twin.release()
        assert cache.check() == []
    assert found(cache, "a", ids) == 20 and found(cache, "b", ids) == 10
    table.release()
    assert cache.reset() > 0 and cache.check() == [] and found(cache, "b", ids) == 0


def test_a_prefix_is_of_one_model_and_declared_under_a_public_identity() -> None:
    cache = PrefixCache(64, SIZE)
    with pytest.raises(ValueError, match="public namespace"):
        cache.declare_public(of("a"), encode(SYSTEM))
    with pytest.raises(ValueError, match="no tokens"):
        cache.declare_public(MODEL, b"")
    with pytest.raises(IdentityMismatch):
        cache.declare_public(of(None, size=8), encode(SYSTEM))
    prefix = cache.declare_public(MODEL, encode(SYSTEM))
    assert cache.declare_public(MODEL, encode(SYSTEM)) is prefix and prefix.num_tokens == 10
    other = dataclasses.replace(MODEL, adapter="x")
    tuned = dataclasses.replace(other, namespace=Namespace("a"))
    with cache.open(cache.acquire(tuned, encode(SYSTEM))) as table:
        table.reserve(10)
        table.commit(10)
        table.publish(encode(SYSTEM), tail=True)
    assert found(cache, "b", SYSTEM) == 0 and cache.account(None).blocks == 0


def test_the_longest_prefix_is_found_among_many_that_nest() -> None:
    prefixes = PublicPrefixes()
    texts = [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 5], [1, 3], [2], [2, 1, 1], [9, 9, 9, 9]]
    for text in texts:
        prefixes.declare(MODEL, encode(text))
    queries = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 9], [2, 1], [2, 1, 1], [0], [9, 9, 9], [1, 3]]
    for query in [*queries, *texts]:
        fit = [t for t in texts if query[: len(t)] == t]
        prefix = prefixes.of(of("a"), encode(query))
        assert (prefix and prefix.tokens) == (encode(max(fit, key=len)) if fit else None)
    for text in texts[::2]:
        (prefix,) = (p for p in prefixes.all() if p.tokens == encode(text))
        prefixes.withdraw(prefix)
    assert len(prefixes.all()) == prefixes.count == 4
    assert prefixes.of(of("a"), encode([1, 2, 3, 4])) is prefixes.all()[0]


def test_remembered_identities_are_bounded() -> None:
    """Salts are the clients' to choose, so what is kept of each must not pile up."""
    prefixes = PublicPrefixes()
    prefix = prefixes.declare(MODEL, encode([1]))
    for i in range(5000):
        assert prefixes.of(of("a", str(i)), encode([1, 2])) is prefix
    assert len(prefixes._seen) <= 4096
