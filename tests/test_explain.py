"""Why a prompt is not resident: always the truth about the rest, and nothing of anybody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from radixkv.cache import PrefixCache
from radixkv.errors import IdentityMismatch
from radixkv.explain import _OF_FIELD, Explanation
from radixkv.identity.identity import CacheIdentity
from radixkv.tokens import encode
from tests.cache_runs import Clock, flood, fresh, identity, run
from tests.cache_shares import Border, Path
from tests.cache_world import World
from tests.test_cache_model import CacheAgainstModel, texts, whos

ME = identity("me")


def why(cache: PrefixCache, ids: list[int], who: CacheIdentity = ME) -> dict[str, int]:
    """Reasons of an explanation, after what holds for every one was checked."""
    return dict(checked(cache, ids, who).reasons)


def checked(cache: PrefixCache, ids: list[int], who: CacheIdentity = ME) -> Explanation:
    tokens = encode(ids)
    found = cache.explain(who, tokens)
    assert found.num_tokens == len(ids)
    assert sum(n for _, n in found.reasons) == len(ids) - found.resident_tokens
    assert all(n > 0 for _, n in found.reasons)
    with cache.acquire(who, tokens) as lease:
        assert lease.cached_tokens == found.resident_tokens
        lease.cancel()
    return found


# -- reasons -----------------------------------------------------------------------------------


def test_a_prompt_that_nobody_had_is_seen_for_the_first_time() -> None:
    cache = PrefixCache(16, 4)
    assert why(cache, fresh(9)) == {"first_seen": 9}
    run(cache, ME, fresh(9))
    assert checked(cache, fresh(9)).divergence is None  # nothing is shared


def test_a_full_hit_leaves_the_last_token() -> None:
    cache = PrefixCache(16, 4)
    for n in (8, 9, 11):
        text = fresh(n)
        run(cache, ME, text)
        assert why(cache, text) == {"last_token": 1}
    one = fresh(1)
    assert why(cache, one) == {"first_seen": 1}
    run(cache, ME, one)
    assert why(cache, one) == {"last_token": 1}


def test_where_it_parts_is_told_to_the_token_with_both_sides() -> None:
    """DIAG-2: where, and what the cache has instead."""
    cache = PrefixCache(64, 4)
    text = fresh(30)
    run(cache, ME, text)
    for at in (1, 3, 4, 10, 29):
        found = checked(cache, [*text[:at], *fresh(12)])
        assert found.resident_tokens == found.divergence == at
        assert found.reasons == (("diverged", 12),)
        assert found.sibling_tokens == tuple(text[at:])
    short = cache.explain(ME, encode([*text[:10], 1]), context=5)
    assert short.sibling_tokens == tuple(text[10:15])


def test_of_several_ways_on_the_newest_is_told() -> None:
    cache = PrefixCache(64, 4)
    stem = fresh(6)
    ways = [[*stem, *fresh(7)] for _ in range(5)]
    for way in ways:
        run(cache, ME, way)
    found = checked(cache, [*stem, 1, 2, 3])
    assert found.divergence == 6 and found.sibling_tokens == tuple(ways[-1][6:])
    found = checked(cache, [*stem, ways[1][6], 1, 2])
    assert found.divergence == 7 and found.sibling_tokens == tuple(ways[1][7:])


def test_what_goes_on_where_the_cache_ends_has_not_diverged() -> None:
    cache = PrefixCache(64, 4)
    for n in (8, 10):
        text = fresh(n)
        run(cache, ME, text)
        found = checked(cache, [*text, *fresh(5)])
        assert found.divergence is None and found.sibling_tokens == ()
        assert found.reasons == (("first_seen", 5),)
        assert checked(cache, text[:6]).divergence is None  # a prefix of it


def test_a_switch_rendered_near_the_beginning_shows_as_that() -> None:
    """TEMPLATE-2: shared 22 tokens, and one other token there."""
    cache = PrefixCache(64, 16)
    who = identity("me", block_size=16)
    head, rest = fresh(22), fresh(200)
    run(cache, who, [*head, 7, *rest])
    found = checked(cache, [*head, 8, *rest], who)
    assert found.divergence == 22 and found.reasons == (("diverged", 201),)
    assert found.sibling_tokens[:3] == (7, rest[0], rest[1])


def test_a_prefix_shorter_than_a_block_is_shared_and_told_as_such() -> None:
    """METRICS-4: 240 shared tokens and blocks of 256: shared, reused, and where it parts."""
    cache = PrefixCache(8, 256)
    who, shared = identity("me", block_size=256), fresh(240)
    run(cache, who, [*shared, *fresh(300)])
    found = checked(cache, [*shared, *fresh(300)], who)
    assert found.resident_tokens == found.divergence == 240
    assert found.reasons == (("diverged", 300),)


def test_what_was_evicted_is_told_from_what_is_new() -> None:
    clock = Clock()
    cache = PrefixCache(8, 4, clock=clock)
    text = fresh(24)
    run(cache, ME, text)
    clock.sleep(5)
    flood(cache, ME, 5)
    clock.sleep(7)
    found = checked(cache, [*text, *fresh(3)])
    resident = found.resident_tokens
    assert 0 < resident < 24
    assert found.reasons == (("evicted", 24 - resident), ("first_seen", 3))
    assert found.evicted_s == pytest.approx(7, abs=0.1)
    assert checked(cache, text).reasons == (("evicted", 23 - resident), ("last_token", 1))
    assert found.divergence is None
    assert cache.explain(ME, encode(fresh(3))).evicted_s is None


def test_evicted_and_then_new_is_not_called_diverged() -> None:
    cache = PrefixCache(9, 4)
    stem, old = fresh(4), fresh(8)
    run(cache, ME, [*stem, *old])
    flood(cache, ME, 8)
    assert cache.lookup(ME, encode([*stem, *old])) == 4
    run(cache, ME, [*stem, *fresh(4)])
    found = checked(cache, [*stem, *old, *fresh(2)])
    assert found.reasons == (("evicted", 8), ("first_seen", 2))
    assert found.divergence == 4  # a fact all the same


def test_a_reset_counts_as_eviction() -> None:
    """DIAG-3: a dry run before and after a clear, and what a request then finds."""
    cache = PrefixCache(64, 4)
    text = fresh(21)
    run(cache, ME, text)
    assert checked(cache, text).resident_tokens == 20
    cache.reset()
    assert why(cache, text) == {"evicted": 20, "last_token": 1}
    assert run(cache, ME, text) == 0
    assert checked(cache, text).resident_tokens == 20


def test_what_a_pin_kept_until_it_ran_out_has_expired() -> None:
    clock = Clock()
    cache = PrefixCache(16, 4, clock=clock)
    text = fresh(24)
    run(cache, ME, text)
    cache.pins.pin(ME, encode(text[:10]), owner="me", ttl_s=60)
    flood(cache, ME, 16)
    assert checked(cache, text).resident_tokens >= 10
    assert "expired" not in why(cache, text)
    clock.sleep(61)
    flood(cache, ME, 16)
    assert checked(cache, text).reasons == (("expired", 10), ("evicted", 13), ("last_token", 1))


def test_an_unpinned_prefix_was_evicted_and_has_not_expired() -> None:
    cache = PrefixCache(16, 4)
    text = fresh(12)
    run(cache, ME, text)
    pin = cache.pins.pin(ME, encode(text), owner="me", ttl_s=60)
    assert cache.pins.unpin(pin.id)
    flood(cache, ME, 16)
    assert why(cache, text) == {"evicted": 11, "last_token": 1}


# -- other identities --------------------------------------------------------------------------

DIFFERING = {
    "adapter": (identity("me", adapter="a"), ("adapter",)),
    "template": (identity("me", template="u"), ("template",)),
    "tokenizer": (identity("me", tokenizer="l"), ("tokenizer",)),
    "execution": (identity("me", kv_dtype="fp8"), ("execution.kv_dtype",)),
    "model": (identity("me", model="n", adapter="a"), ("model", "adapter")),
    "namespace": (identity("me", "salt"), ("namespace.salt",)),
}


@pytest.mark.parametrize("reason", DIFFERING)
def test_the_same_tokens_under_another_identity_are_told_with_what_differs(reason: str) -> None:
    """IDENTITY-1: base and adapters never share, and that is said."""
    other, differing = DIFFERING[reason]
    cache = PrefixCache(64, 4)
    text = fresh(24)
    run(cache, other, text)
    found = checked(cache, [*text, *fresh(2)])
    assert found.resident_tokens == 0 and found.other == differing
    assert found.reasons == ((reason, 24), ("first_seen", 2))
    assert found.divergence is None and found.sibling_tokens == ()
    assert checked(cache, text).reasons == ((reason, 23), ("last_token", 1))


def test_behind_a_salt_nothing_of_the_tenants_other_salts_shows() -> None:
    """SECURITY-1: a tenant's users are kept apart by salts, so none is told what others sent."""
    empty, cache = PrefixCache(256, 4), PrefixCache(256, 4)
    secret = fresh(64)
    for other in (ME, identity("me", "theirs"), identity("me", "theirs", adapter="a")):
        run(cache, other, secret)
    mine = identity("me", "mine")
    for guess in range(1, 65):
        tokens = encode(secret[:guess])
        assert cache.explain(mine, tokens) == empty.explain(mine, tokens)
    told = cache.explain(mine, encode(secret), every_salt=True)
    assert told.reasons == (("namespace", 63), ("last_token", 1))
    run(cache, identity("me", "mine", adapter="a"), secret)  # its own, under another adapter
    assert cache.explain(mine, encode(secret)).reasons == (("adapter", 63), ("last_token", 1))


def test_the_identity_that_has_most_is_named_and_of_equals_the_nearest() -> None:
    cache = PrefixCache(64, 4)
    text = fresh(24)
    run(cache, identity("me", adapter="a", template="u"), text)
    assert checked(cache, text).other == ("template", "adapter")
    run(cache, identity("me", adapter="a"), text)
    assert checked(cache, text).other == ("adapter",)
    run(cache, ME, text[:8])
    longer = [*text, *fresh(8)]
    run(cache, identity("me", "salt"), longer)
    found = checked(cache, longer)
    assert found.other == ("namespace.salt",)
    assert found.resident_tokens == 8
    assert found.reasons == (("namespace", 23), ("last_token", 1))


def test_a_few_tokens_in_common_with_another_identity_explain_nothing() -> None:
    """All chats begin alike: that must not hide where this one parts from its own past."""
    cache = PrefixCache(64, 4)
    text = fresh(20)
    run(cache, ME, text)
    run(cache, identity("me", adapter="a"), [*text[:8], 1, 2, 3])
    found = checked(cache, [*text[:8], 1, 2, 3, *fresh(5)])
    assert found.divergence == 8 and found.other == ()
    assert found.reasons == (("diverged", 8),)


def test_nothing_of_another_tenant_shows_whatever_differs() -> None:
    """SECURITY-1: guesses of every length, with and without salts, read like an empty cache."""
    empty, cache = PrefixCache(256, 4), PrefixCache(256, 4)
    secret = fresh(64)
    for other in (
        identity("you"),
        identity("you", "salt"),
        identity("you", adapter="a"),
        identity(None),
    ):
        run(cache, other, secret)
    for guess in range(1, 65):
        for who in (ME, identity("me", "salt"), identity("me", adapter="a")):
            tokens = encode(secret[:guess])
            assert cache.explain(who, tokens) == empty.explain(who, tokens)
    cache.reset()  # nor of what went
    assert cache.explain(ME, encode(secret)) == empty.explain(ME, encode(secret))


# -- public prefixes ---------------------------------------------------------------------------


def shared(cache: PrefixCache, num_tokens: int) -> list[int]:
    """A prefix that is declared public, and has been computed once by itself."""
    prefix = fresh(num_tokens)
    public = identity(None)
    cache.declare_public(public, encode(prefix))
    run(cache, public, prefix)
    return prefix


def test_behind_a_public_prefix_only_ones_own_is_told() -> None:
    """SECURITY-1: a hit ends at the border, and so does what can be learnt."""
    for n in (8, 10):
        cache = PrefixCache(64, 4)
        prefix = shared(cache, n)
        mine, yours = [*prefix, *fresh(9)], [*prefix, *fresh(9)]
        run(cache, identity("you"), yours)
        found = checked(cache, yours)
        assert (found.resident_tokens, found.reasons) == (n, (("first_seen", 9),))
        assert found.divergence is None and found.sibling_tokens == ()
        run(cache, ME, mine)
        found = checked(cache, yours)
        assert (found.resident_tokens, found.reasons) == (n, (("diverged", 9),))
        assert (found.divergence, found.sibling_tokens) == (n, tuple(mine[n:]))
        found = checked(cache, [*mine[: n + 3], *fresh(2)])
        assert (found.divergence, found.sibling_tokens) == (n + 3, tuple(mine[n + 3 :]))
        found = checked(cache, mine, identity("me", "salt"))
        assert (found.resident_tokens, found.other) == (n, ())
        salted = [*prefix, *fresh(9)]
        run(cache, identity("me", "salt"), salted)
        found = checked(cache, salted)
        assert (found.resident_tokens, found.other) == (n, ("namespace.salt",))


def test_what_went_is_told_of_both_sides_of_the_border() -> None:
    cache = PrefixCache(16, 4)
    prefix = shared(cache, 8)
    text = [*prefix, *fresh(8)]
    run(cache, ME, text)
    flood(cache, identity("you"), 16)
    found = checked(cache, text)
    assert found.resident_tokens == 0
    assert found.reasons == (("evicted", 15), ("last_token", 1))
    never = checked(cache, text, identity("other"))
    assert never.reasons == (("evicted", 8), ("first_seen", 8))  # the public part, and no more


def test_the_end_of_a_public_prefix_that_fills_no_block_is_lost_at_the_border() -> None:
    """METRICS-4: and told as that."""
    cache = PrefixCache(64, 4)
    prefix = fresh(10)
    cache.declare_public(identity(None), encode(prefix))
    run(cache, identity("you"), [*prefix, *fresh(6)])  # its KV never ended at the border
    found = checked(cache, [*prefix, *fresh(5)])
    assert found.resident_tokens == 8
    assert found.reasons == (("below_block", 2), ("first_seen", 5))


# -- modes ---------------------------------------------------------------------------------------


def test_a_cache_that_is_off_or_told_to_miss_says_so() -> None:
    for cache in (PrefixCache(16, 4, enabled=False), PrefixCache(16, 4, force_miss=True)):
        text = fresh(9)
        run(cache, ME, text)
        assert why(cache, text) == {"disabled": 9}


def test_what_may_not_be_read_is_told_apart_from_what_is_not_there() -> None:
    cache = PrefixCache(16, 4)
    text = fresh(10)
    run(cache, ME, text)
    more = encode([*text, *fresh(3)])
    assert cache.explain(ME, more, max_cached=0).reasons == (("disabled", 10), ("first_seen", 3))
    assert cache.explain(ME, more, max_cached=6).reasons == (("disabled", 4), ("first_seen", 3))
    assert cache.explain(ME, more, max_cached=13).reasons == (("first_seen", 3),)
    same = encode(text)
    assert cache.explain(ME, same, max_cached=4).reasons == (("disabled", 5), ("last_token", 1))
    assert cache.explain(ME, same, max_cached=10).reasons == ()


def test_an_identity_with_other_blocks_is_refused_as_by_acquire() -> None:
    cache = PrefixCache(16, 4)
    with pytest.raises(IdentityMismatch):
        cache.explain(identity("me", block_size=8), encode(fresh(9)))
    assert cache.explain(ME, b"") == Explanation(0, 0, ())


def test_it_touches_and_counts_nothing() -> None:
    """DIAG-3: a dry run changes neither the order of eviction nor any number."""

    def life(explained: bool) -> list[object]:
        cache = PrefixCache(12, 4)
        mine = [range(100 * i, 100 * i + 11) for i in range(6)]
        out: list[object] = []
        for i, text in enumerate(mine):
            run(cache, ME, text)
            if explained:
                for other in mine:
                    cache.explain(ME, encode(other))
            out.append(cache.lookup(ME, encode(mine[i // 2])))
        out += [cache.stats(), cache.version, cache.tree.clock, cache.account("me")]
        return out

    assert life(True) == life(False)


# -- against the dull model --------------------------------------------------------------------


class ExplainedWorld(World):
    """Everybody asks why before he acquires."""

    def seen(self, who: int, border: Border | None, tokens: Sequence[int], of: set[Path]) -> bool:
        """Whether ``tokens`` begin any path of those that ``who`` may know of."""
        for place, *path in of:
            mine = place == who or (isinstance(place, tuple) and place[0] == who)
            public = border is not None and place == border.public
            if (mine or public) and path[: len(tokens)] == [*tokens]:
                return True
        return False

    def explain(self, who: int, tokens: list[int], limit: int | None) -> Explanation:
        before = self.cache.stats(), self.cache.tree.clock
        found = self.cache.explain(self.identities[who], encode(tokens), max_cached=limit)
        assert (self.cache.stats(), self.cache.tree.clock) == before
        n = len(tokens)
        longest, _ = self.find(who, tokens, n)
        border = self.border(who, tokens)
        assert found.num_tokens == n
        assert found.resident_tokens == max(0, min(longest, n - 1 if limit is None else limit))
        assert sum(count for _, count in found.reasons) == n - found.resident_tokens
        assert all(count > 0 for _, count in found.reasons)
        at = found.resident_tokens
        for reason, count in found.reasons:
            end = at + count
            if reason == "evicted":
                assert at >= longest, "it is resident"
                assert self.seen(who, border, tokens[:end], self.published), "it never was there"
            elif reason == "disabled":
                assert end <= longest or longest == n
            elif reason == "below_block":
                assert border is not None and end == len(border.tokens)
            elif reason in ("model", "namespace"):
                assert found.other == ((reason,) if reason == "model" else ("namespace.salt",))
                assert reason == "model" or self.identities[who].namespace.salt is None
                tenants = self.shares.tenant_of
                others = {i for i, t in tenants.items() if t == tenants[who]} - {who}
                numbers = [i for i in others if isinstance(i, int)]
                assert max(self.find(i, tokens, n)[0] for i in numbers) >= end > longest
            else:
                assert reason in ("diverged", "first_seen", "last_token")
            at = end
        if found.divergence is not None:
            assert found.divergence == longest < n
            other = [*tokens[:longest], *found.sibling_tokens]
            assert self.seen(who, None, other, {*self.resident})
            assert found.sibling_tokens[0] != tokens[longest]
        elif border is None and 0 < longest < n:
            assert not any(
                p[0] == who and [*p[1:]] > tokens[:longest] == [*p[1 : longest + 1]]
                for p in self.resident
            ), "there is another way on"
        return found

    def acquire(self, who: int, tokens: list[int], spare: int, batch: bool = False) -> None:
        found = self.explain(who, tokens, max(0, len(tokens) - spare))
        super().acquire(who, tokens, spare, batch)
        assert self.leases[-1].lease.cached_tokens == found.resident_tokens


class ExplainAgainstModel(CacheAgainstModel):
    kind = ExplainedWorld
    world: ExplainedWorld

    @rule(who=whos, text=texts, limit=st.none() | st.integers(0, 20), public=st.booleans())
    def explain(self, who: int, text: list[int], limit: int | None, public: bool) -> None:
        self.world.explain(self.who(who), self.text(text, public), limit)


TestExplainAgainstModel = ExplainAgainstModel.TestCase
TestExplainAgainstModel.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_every_field_of_an_identity_has_its_reason() -> None:
    named = {name for name, _ in _OF_FIELD}
    assert named == {f.name for f in fields(CacheIdentity) if f.compare and f.init}
