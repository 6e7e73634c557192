"""Pins of an engine by owner: shares that do not touch, room that stays, the library's calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.keep import Keep
from radixkv.service.engine.keeping import Keeper
from radixkv.service.engine.params import SamplingParams
from tests.fake_model import Rig
from tests.http_server import build_engine

BLOCK = 16


@pytest.fixture
def engine() -> Iterator[Engine]:
    """64 blocks, 16 of which may be pinned."""
    with build_engine(kv_memory="512KiB", max_model_len=512, pin_budget=0.25) as engine:
        yield engine
        assert engine.check() == []


def words(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(num_tokens)]


def flood(engine: Engine) -> None:
    for seed in range(12):
        engine.generate(words(12 * BLOCK, 1000 + seed), max_tokens=1, tenant="loud")


def test_the_library_pins_lists_and_lets_go(engine: Engine) -> None:
    """EVICT-3"""
    prompt = words(5 * BLOCK + 3, 1)
    kept = engine.pin(prompt, name="mine", ttl_s=60.0)
    assert kept.granted_tokens == len(prompt) and kept.keep == Keep(len(prompt), 60.0, "mine")
    (pin,) = engine.pins.of("local")
    assert (pin.id, pin.name, pin.tokens, pin.blocks) == (kept.pin_id, "mine", len(prompt), 6)
    assert pin.expires_at is not None and pin.expires_at - pin.created_at == pytest.approx(60.0)
    flood(engine)
    assert engine.generate(prompt, max_tokens=1).usage.cached_tokens == len(prompt) - 1
    assert engine.pins.unpin("local", name="mine") == [kept.pin_id]
    assert engine.pins.unpin("local", name="mine") == []
    flood(engine)
    assert engine.generate(prompt, max_tokens=1).usage.cached_tokens == 0


def test_each_owner_has_a_share_that_no_other_touches(engine: Engine) -> None:
    """SECURITY-1: what is granted to one says nothing of another's pins; EVICT-4."""
    prompt = words(10 * BLOCK, 2)
    engine.pins.set_shares({"a": 1.0, "b": 3.0}, {})
    assert engine.pins.budget("a").blocks == 4 and engine.pins.budget("b").blocks == 12
    before = engine.pin(prompt, tenant="a")
    assert before.granted_tokens == 4 * BLOCK
    assert engine.pins.unpin("a", pin_id=before.pin_id)
    assert engine.pin(words(12 * BLOCK, 3), tenant="b").granted_tokens == 12 * BLOCK
    assert engine.pins.budget("a").used_blocks == 0
    assert engine.pin(prompt, tenant="a").granted_tokens == 4 * BLOCK
    assert engine.pin(prompt, tenant="nobody").pin_id is None
    assert [pin.owner for pin in engine.pins.of()] == ["b", "a"]
    assert engine.pins.unpin("b", pin_id=engine.pins.of("a")[0].id) == [], "not b's"
    assert len(engine.pins.of("a")) == 1


def test_what_an_owner_had_pinned_who_is_gone_is_let_go(engine: Engine) -> None:
    """EVICT-4: nobody could unpin it, and it would keep blocks from those who are left."""
    prompt = words(3 * BLOCK, 9)
    engine.pins.set_shares({"a": 1.0, "b": 1.0}, {})
    for owner in ("a", "b"):
        assert engine.pin(prompt, tenant=owner).granted_tokens == len(prompt)
    engine.pins.set_shares({"b": 1.0}, {})
    assert [pin.owner for pin in engine.pins.of()] == ["b"]
    flood(engine)
    assert engine.generate(prompt, max_tokens=1, tenant="b").usage.cached_tokens == 3 * BLOCK - 1
    assert engine.generate(prompt, max_tokens=1, tenant="a").usage.cached_tokens == 0


def test_one_prompt_of_two_owners_stays_until_both_let_it_go(engine: Engine) -> None:
    """EVICT-4"""
    prompt = words(3 * BLOCK, 4)
    for owner in ("a", "b"):
        assert engine.pin(prompt, tenant=owner).granted_tokens == len(prompt)
    engine.pins.unpin("a", pin_id=engine.pins.of("a")[0].id)
    flood(engine)
    assert engine.generate(prompt, max_tokens=1, tenant="b").usage.cached_tokens == 3 * BLOCK - 1
    assert engine.generate(prompt, max_tokens=1, tenant="a").usage.cached_tokens == 0


def test_floors_of_others_leave_less_to_pin(engine: Engine) -> None:
    engine.pins.set_shares({"a": 1.0, "b": 1.0}, {"a": 0, "b": 24})
    # 64 blocks, of which 24 are b's and 32 the longest request's
    assert engine.pins.budget("a").blocks == engine.pins.budget("b").blocks == 4
    engine.pins.set_shares({"a": 1.0, "b": 1.0}, {"a": 24, "b": 40})
    assert engine.pins.budget("a").blocks == 0


def test_several_prefixes_of_a_prompt_are_kept_the_shortest_first(engine: Engine) -> None:
    prompt = words(20 * BLOCK, 5)
    keeps = [Keep(18 * BLOCK, 300.0), Keep(6 * BLOCK + 7, 3600.0), Keep(0, 60.0)]
    stream = engine.submit(prompt, SamplingParams(max_tokens=1), keeps=keeps)
    kept = stream.result().kept
    assert [(k.keep.num_tokens, k.granted_tokens) for k in kept] == [
        (0, 0),
        (6 * BLOCK + 7, 6 * BLOCK + 7),
        (18 * BLOCK, 16 * BLOCK),
    ]
    assert [pin.ttl_s for pin in engine.pins.of()] == [3600.0, 300.0]
    assert engine.pins.budget("local").used_blocks == 16


@pytest.mark.parametrize("may_publish", [True, False])
def test_what_gone_weights_computed_is_not_pinned(may_publish: bool) -> None:
    """ADMIN-2: it belongs to no identity any more."""
    rig = Rig(max_batch_tokens=32)
    keeper = Keeper(rig.cache, Capacity(64, rig.cache.block_size, 160, pinnable_blocks=16))
    stream = rig.submit(range(50), max_tokens=2)
    rig.turn()
    (request,) = rig.core.in_flight()
    request.on_prompt = partial(keeper.prompt_computed, [Keep(50)])
    request.may_publish = may_publish
    while not stream.finished:
        rig.turn()
    assert stream.kept[0].granted_tokens == (50 if may_publish else 0)


def test_the_longest_request_fits_beside_all_that_may_be_pinned() -> None:
    """SCHED-1"""
    for share in (0.0, 0.25, 0.9):
        plan = Capacity.plan(
            kv_memory=1000,
            bytes_per_block=10,
            block_size=16,
            model_len=640,
            max_model_len=None,
            pin_budget=share,
        )
        assert plan.pinnable_blocks == min(int(share * 100), 60)
        alone = SamplingParams(n=1)
        assert plan.max_tokens(600, alone, param="prompt") == 40
    tight = Capacity.plan(
        kv_memory=100, bytes_per_block=10, block_size=16, model_len=640, max_model_len=None,
        pin_budget=0.5,
    )  # fmt: skip
    assert tight.pinnable_blocks == 0
