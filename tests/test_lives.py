"""Random lives of one engine that several tenants share, with everything at once in a tiny pool.

Beams, several choices, best of, batch work, preemption to the host, pins that expire, public
prompts that come and go, quotas, floors and weights that change, resets and aborts: after each act
the books are right, and every answer is what the model says with no cache at all.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from radixkv.errors import CacheBusy, InvalidConfig, NeverFits
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.public import PublicPrefix
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.explaining import explain
from radixkv.service.engine.origin import Origin
from radixkv.service.engine.shares import TenantShare
from radixkv.service.engine.stream import Stream
from radixkv.tokens import encode
from tests.fake_model import VOCAB, Rig, greedy, ids_of

TENANTS = ("a", "b", "c")
TEXTS = [[random.Random(seed).randrange(VOCAB) for _ in range(160)] for seed in range(4)]


@dataclass
class Asked:
    """A request, and how to ask for the same without a cache."""

    stream: Stream
    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any]


class Life:
    """One engine, its clock, and what was asked of it."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.block_size = rng.choice((1, 2, 4))
        self.num_blocks = rng.choice((12, 20, 40)) * (4 // self.block_size)
        self.rig = Rig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_batch_tokens=rng.choice((3, 8, 17, 64)),
            max_num_seqs=rng.choice((2, 4, 8)),
            lookahead_tokens=rng.choice((0, 2, 8)),
            swap_memory=rng.choice((0, 200, 10**6)),
            batch_share=rng.choice((0.1, 0.5, 1.0)),
        )
        self.rig.runner.copy_s = rng.choice((1e-9, 1e-6, 1.0))
        self.now_s = 0.0
        self.rig.cache.pins.clock = lambda: self.now_s
        self.longest = int(self.num_blocks * self.block_size * rng.choice((0.3, 0.5, 0.8)))
        self.asked: list[Asked] = []
        self.public: list[PublicPrefix] = []
        self.counters: dict[str, Any] = {}
        self.num_explained = 0

    def origin(self) -> Origin:
        rng = self.random
        salt = rng.choice((None, None, "s", "b"))
        return Origin(rng.choice(TENANTS), salt, None, rng.randrange(3), rng.random() < 0.25)

    def prompt(self) -> list[int]:
        rng = self.random
        tokens = rng.choice(TEXTS)[: rng.randrange(1, self.longest - 1)]
        return tokens + [rng.randrange(VOCAB)] * (rng.random() < 0.3)

    def fits(self, tenant: str, num_blocks: int) -> bool:
        """Whether so many are there beside all that others were promised."""
        cache = self.rig.cache
        floors = sum(account.floor for account in cache.accounts if account.tenant != tenant)
        return num_blocks + 2 <= self.num_blocks - floors - cache.pins.num_blocks

    # -- what happens ------------------------------------------------------------------------------

    def submit(self) -> None:
        rng, origin, prompt = self.random, self.origin(), self.prompt()
        max_tokens = rng.randrange(1, 13)
        fields: dict[str, Any] = {"seed": rng.choice((None, 1))}
        kind, width = rng.random(), rng.randrange(1, 4)
        if kind < 0.15:
            fields = {"beams": BeamParams(width), "n": rng.randrange(1, width + 1)}
        elif kind < 0.35:
            fields = {"seed": 1, "n": width}
        elif kind < 0.45:
            fields = {"seed": 1, "n": 1, "best_of": width}
        need = -(-len(prompt) // self.block_size) + width * (max_tokens // self.block_size + 3)
        if width <= self.rig.core.scheduler.live.max_num_seqs and self.fits(origin.tenant, need):
            stream = self.rig.submit(prompt, max_tokens, origin=origin, **fields)
            self.asked.append(Asked(stream, prompt, max_tokens, fields))

    def explain_and_ask(self) -> None:
        """DIAG-3: what is said to be resident is what the next request finds."""
        rig, prompt, origin = self.rig, self.prompt(), replace(self.origin(), batch=False)
        if not self.fits(origin.tenant, len(prompt) // self.block_size + 3):
            return
        self.come_to_rest()
        before = rig.cache.version, rig.cache.stats()
        told = explain(rig.core.scheduler, rig._identify("fake", origin), encode(prompt))
        assert (rig.cache.version, rig.cache.stats()) == before
        stream = rig.submit(prompt, 1, origin=origin)
        self.come_to_rest()
        assert stream.usage.cached_tokens == told.resident_tokens
        self.num_explained += 1

    def pin(self) -> None:
        rng, pins, origin = self.random, self.rig.cache.pins, self.origin()
        pins.set_budget(origin.tenant, rng.choice((0, 1, 3, self.num_blocks // 6)))
        if pins.num_blocks <= self.num_blocks // 4:
            pins.pin(
                self.rig._identify("fake", origin),
                encode(self.prompt()),
                owner=origin.tenant,
                ttl_s=rng.choice((None, 1.0, 30.0)),
            )

    def unpin(self) -> None:
        pins = self.rig.cache.pins
        for pin in pins.list()[:1]:
            assert pins.unpin(pin.id)

    def declare_or_withdraw(self) -> None:
        if len(self.public) < 3 and self.random.random() < 0.6:
            identity = CacheIdentity.local("fake", self.block_size)
            identity = replace(identity, namespace=Namespace.public())
            self.public.append(self.rig.cache.declare_public(identity, encode(self.prompt())))
        elif self.public:
            self.rig.cache.withdraw_public(self.public.pop())

    def share(self) -> None:
        rng, tenant = self.random, self.random.choice(TENANTS)
        weight, most = rng.choice((0.001, 1.0, 7.0, 1000.0)), rng.choice((None, 1, 3))
        self.rig.core.set_tenant(tenant, TenantShare(weight, max_running=most))
        with contextlib.suppress(InvalidConfig):
            self.rig.cache.set_share(tenant, quota=rng.choice((None, 3)), floor=rng.choice((0, 3)))

    def abort(self) -> None:
        if self.asked:
            self.random.choice(self.asked).stream.abort()

    def reset(self) -> None:
        with contextlib.suppress(CacheBusy):
            self.rig.cache.reset()

    def change_weights(self) -> None:
        self.rig.core.weights_changed()

    def pause(self) -> None:
        self.rig.runner.now_s += self.random.choice((0.0, 1e-3, 1e4, 1e9))
        self.now_s += self.random.choice((0.0, 0.5, 40.0))

    # -- what must be so ---------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        for _ in range(3000):
            self.rig.core.turn()
            if self.rig.core.scheduler.idle:
                return
        raise AssertionError("still busy")

    def audit(self) -> None:
        core, cache = self.rig.core, self.rig.cache
        assert core.check() == [] and core.counters.violations == 0
        stats, tenants = core.stats, core.stats.by_tenant.values()
        assert sum(t.num_running for t in tenants) == stats.num_running
        assert sum(t.num_waiting for t in tenants) == stats.num_waiting
        accounts = [cache.account(account.tenant) for account in [*cache.accounts]]
        assert sum(account.blocks for account in accounts) == cache.cached_blocks
        counters = {name: n for name, n in asdict(stats).items() if name.endswith("_total")}
        for name, before in self.counters.items():
            if isinstance(before, int | float):
                assert counters[name] >= before, name
        self.counters = counters
        for account in core.scheduler.fairness:
            assert math.isfinite(account.ran) and math.isfinite(account.admission_level)
        if core.scheduler.idle:
            at_rest = cache.free_blocks + cache.evictable_blocks + cache.pins.num_blocks
            assert at_rest == self.num_blocks

    def verify(self) -> None:
        """All that was asked has ended, and was answered as if there were no cache."""
        for each in self.asked:
            assert each.stream.finished
            try:
                choices = each.stream.result().choices
            except NeverFits:  # others were promised more since it came
                continue
            if any(choice.finish_reason == "abort" for choice in choices):
                continue
            if each.fields == {"seed": None}:
                assert ids_of(each.stream) == [greedy(each.prompt, each.max_tokens)]
            elif self.random.random() < 0.3:
                alone = Rig(num_blocks=512, block_size=self.block_size, enabled=False)
                expected = alone.submit(each.prompt, each.max_tokens, **each.fields)
                alone.run()
                assert ids_of(each.stream) == ids_of(expected)
        self.asked.clear()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_tenants_do_at_once_the_books_are_right_and_so_are_the_answers(seed: int) -> None:
    """CORRECT-1, SECURITY-7, LEAK, METRICS-3, DIAG-3, EVICT-4."""
    life = Life(seed)
    acts: dict[Callable[[], None], float] = {
        life.submit: 30,
        life.explain_and_ask: 4,
        life.pin: 4,
        life.unpin: 2,
        life.declare_or_withdraw: 2,
        life.share: 1.5,
        life.abort: 4,
        life.reset: 1,
        life.change_weights: 0.3,
        life.pause: 2,
    }
    for _ in range(80):
        (act,) = life.random.choices([*acts], [*acts.values()])
        act()
        for _ in range(life.random.randrange(4)):
            life.rig.core.turn()
            life.audit()
    life.come_to_rest()
    life.audit()
    assert life.num_explained
    life.verify()
