"""What a look says is what a request sent next gets: through the real engine, whatever came before.

The model is tiny and real; prompts are drawn from a few branches, so that they share, diverge, are
evicted and come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from radixkv.explain import Explanation
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.explaining import DISABLED, IN_FLIGHT, Explained
from radixkv.service.engine.origin import Origin
from tests.fake_model import Rig
from tests.http_server import build_engine

A, B = Origin(tenant="a"), Origin(tenant="b")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine whose pool holds a few of the prompts."""
    with build_engine(kv_memory="96KiB", max_model_len=160) as engine:
        yield engine


def cached(engine: Engine, ids: Sequence[int], origin: Origin, max_tokens: int = 2) -> int:
    generation = engine.generate(
        ids, max_tokens=max_tokens, ignore_eos=True, temperature=0, tenant=origin.tenant,
        salt=origin.salt,
    )  # fmt: skip
    return generation.usage.cached_tokens


def check(explained: Explained, ids: Sequence[int]) -> None:
    assert explained.num_tokens == len(ids)
    assert sum(explained.reasons.values()) == len(ids) - explained.resident_tokens
    assert all(n > 0 for n in explained.reasons.values())
    at = explained.divergence
    if at is not None:
        assert explained.sibling_tokens[0] != ids[at]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_said_to_be_resident_is_what_the_same_request_gets(
    engine: Engine, seed: int
) -> None:
    """DIAG-3: before and after evictions and resets, for whole and broken blocks."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, 60) for _ in range(90)] for _ in range(3)]
    engine.cache.reset()
    hits = evictions = 0
    for _ in range(60):
        stem = draw.choice(stems)
        ids = stem[: draw.randrange(1, 90)] + [
            draw.randrange(3, 60) for _ in range(draw.choice((0, 1, 15, 16, 40)))
        ]
        origin = draw.choice((A, A, B, Origin(tenant="a", salt="s")))
        explained = engine.cache.explain(ids, origin=origin)
        check(explained, ids)
        assert explained == engine.cache.explain(ids, origin=origin), "looking changes nothing"
        got = cached(engine, ids, origin, draw.choice((1, 2, 20)))
        assert got == explained.resident_tokens
        hits += got > 0
        evictions = engine.cache.stats().evicted_blocks
        if draw.random() < 0.03:
            engine.cache.reset()
            assert engine.cache.explain(ids, origin=origin).resident_tokens == 0
    assert hits > 5 and evictions > 20, "the test has met what it is about"
    assert engine.check() == []


def test_a_look_touches_neither_order_nor_counters(engine: Engine) -> None:
    """DIAG-3: what was looked at is evicted no later, and counted nowhere."""
    engine.cache.reset()
    prompts = [[10 + i] * 60 for i in range(40)]
    cached(engine, prompts[0], A)
    before = engine.cache.stats()
    for prompt in prompts[1:]:
        assert engine.cache.explain(prompts[0], origin=A).num_tokens == 60
        cached(engine, prompt, A)
    assert engine.cache.explain(prompts[0], origin=A).resident_tokens == 0, "evicted as the oldest"
    after = engine.cache.stats()
    assert after.queries - before.queries == len(prompts) - 1


def test_another_tenants_prompt_is_first_seen(engine: Engine) -> None:
    """SECURITY-1: whatever tenant A sent, B is told the same as of a prompt that nobody sent."""
    engine.cache.reset()
    secret = list(range(3, 93))
    cached(engine, secret, A)
    for guess in (secret, secret[:40], [*secret[:32], 9, 9, 9]):
        told = engine.cache.explain(guess, origin=B)
        assert told.resident_tokens == 0
        assert set(told.reasons) == {"first_seen"}
        assert told.divergence is None and told.sibling_tokens == () and told.differs_in == ()
        nobody = engine.cache.explain(guess, origin=Origin(tenant="c"))
        assert (told.reasons, told.resident_tokens) == (nobody.reasons, nobody.resident_tokens)


def test_both_sides_of_a_divergence_are_told(engine: Engine) -> None:
    engine.cache.reset()
    cached(engine, [5] * 40 + [6] * 20, A)
    told = engine.cache.explain([5] * 40 + [7] * 20, origin=A)
    assert told.divergence == told.resident_tokens == 40
    assert told.sibling_tokens[:20] == (6,) * 20
    assert told.reasons == {"diverged": 20}


def test_what_a_salt_has_is_told_to_the_tenant_itself_and_to_an_admin(engine: Engine) -> None:
    """SECURITY-1: and to nobody behind another salt of it, who may be another user."""
    engine.cache.reset()
    salted = Origin(tenant="a", salt="s")
    cached(engine, [8] * 60, salted)
    for told in (
        engine.cache.explain([8] * 60, origin=A),
        engine.cache.explain([8] * 60, origin=Origin(tenant="a", salt="t"), every_salt=True),
    ):
        assert told.resident_tokens == 0
        assert told.reasons.get("namespace", 0) > 40
        assert told.differs_in == ("namespace.salt",)
    hidden = engine.cache.explain([8] * 60, origin=Origin(tenant="a", salt="t"))
    assert hidden.reasons == {"first_seen": 60} and hidden.differs_in == ()


def test_a_request_that_reads_nothing_is_told_so(engine: Engine) -> None:
    cached(engine, [5] * 60, A)
    told = engine.cache.explain([5] * 60, origin=A, may_read=False)
    assert (told.resident_tokens, told.reasons) == (0, {DISABLED: 60})


def test_with_the_cache_off_or_told_to_miss_all_is_disabled() -> None:
    for settings in ({"prefix_cache": False}, {"force_miss": True}):
        with build_engine(**settings) as off:
            cached(off, [5] * 60, A)
            told = off.cache.explain([5] * 60, origin=A)
            assert (told.resident_tokens, told.reasons) == (0, {DISABLED: 60})


def test_the_account_of_an_admission_says_what_usage_says(engine: Engine) -> None:
    from radixkv.service.engine.params import SamplingParams

    engine.cache.reset()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for ids in ([5] * 40, [5] * 40, [5] * 30 + [6] * 30, [5] * 60):
        stream = engine.submit(ids, params, explain=True)
        usage = stream.result().usage
        assert stream.explained is not None
        check(stream.explained, ids)
        assert stream.explained.resident_tokens == usage.cached_tokens
    plain = engine.submit([5] * 40, params)
    plain.result()
    assert plain.explained is None, "who does not ask pays nothing"


def test_what_a_running_request_computes_now_is_in_flight() -> None:
    """The followers of a cold prefix are told that it is being computed, not that it is unknown."""
    from radixkv.service.engine.explaining import explain
    from radixkv.tokens import encode

    rig = Rig(max_batch_tokens=8, block_size=4)
    prompt = [7] * 40
    stream = rig.submit(prompt, 4)
    rig.turn(2)  # 16 of 40 tokens
    (running,) = rig.core.scheduler.running
    identity = running.request.identity
    told = explain(rig.core.scheduler, identity, encode([*prompt[:30], 9, 9]))
    assert told.resident_tokens == 16
    assert told.reasons[IN_FLIGHT] == 12, "whole blocks of what both share"
    assert sum(told.reasons.values()) == 32 - 16
    other = explain(rig.core.scheduler, identity, encode([8] * 20))
    assert IN_FLIGHT not in other.reasons
    rig.run()
    assert stream.finished
    told = explain(rig.core.scheduler, identity, encode([*prompt[:30], 9, 9]))
    assert (told.resident_tokens, IN_FLIGHT in told.reasons) == (30, False)


def test_a_reason_that_comes_twice_in_a_prompt_counts_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, then expired, then evicted again: the account once lost the first, and the engine
    its life."""
    account = (("evicted", 16), ("expired", 16), ("evicted", 7), ("last_token", 1))
    told = Explanation(num_tokens=40, resident_tokens=0, reasons=account)
    monkeypatch.setattr(engine._core.cache, "explain", lambda *args, **kwargs: told)
    ids = list(range(3, 43))
    check(engine.cache.explain(ids, origin=A), ids)
    assert cached(engine, ids, A) == 0
    assert engine.alive


def test_an_account_that_fails_costs_no_answer_and_is_reported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-2: errors in accounting are reported, never fatal."""

    def fail(*args: object, **kwargs: object) -> Explained:
        raise AssertionError("an account that does not add up")

    before = engine.stats().violations_total
    with monkeypatch.context() as patch:
        patch.setattr("radixkv.service.engine.running.explain_admission", fail)
        asked = engine.generate([5, 6, 7], max_tokens=2, ignore_eos=True, tenant="a")
    assert len(asked.token_ids) == 2 and engine.alive
    assert engine.stats().violations_total == before + 1
    assert engine.check() == []
