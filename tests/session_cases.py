"""What tests of sessions share: a small engine with room for pins, floods, and a clock to turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixkv import Engine
from tests.cache_runs import Clock
from tests.http_server import build_engine

BLOCK = 16
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SYSTEM = "You are a user of the hello system, and the other is an assistant."


@contextmanager
def session_engine(**settings: Any) -> Iterator[Engine]:
    """An engine of 128 blocks, of which 64 may be pinned; at the end nothing may be held."""
    small: dict[str, Any] = {"kv_memory": "1MiB", "max_model_len": 1024, "pin_budget": 0.5}
    with build_engine(**(small | settings)) as engine:
        yield engine
        if engine.alive:
            assert engine.drain(20.0)
            assert engine.check() == []
            assert engine.pins.of() == []
            stats = engine.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


def turn_clock(engine: Engine) -> Clock:
    """Let the pins of ``engine`` go by a clock that stands still, until it is told to sleep."""
    clock = Clock()
    engine._core.call(lambda: setattr(engine._core.cache.pins, "clock", clock)).result()
    return clock


def flood(engine: Engine, seed: int = 0, tenant: str = "loud") -> None:
    """Ask for so much else that whatever is not held is evicted."""
    rng = random.Random(seed)
    for _ in range(2 * engine.stats().num_blocks // 32 + 2):
        prompt = [rng.randrange(3, 300) for _ in range(32 * BLOCK)]
        engine.generate(prompt, max_tokens=1, temperature=0, tenant=tenant)
