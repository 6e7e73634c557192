"""Whole requests at a bare cache, for tests of what is around it: run one, flood it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity, Execution, Namespace
from radixkv.tokens import encode

_fresh = count(1_000_000)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def identity(
    tenant: str | None = None,
    salt: str | None = None,
    *,
    block_size: int = 4,
    model: str = "m",
    tokenizer: str = "k",
    template: str | None = "t",
    adapter: str | None = None,
    kv_dtype: str = "bf16",
) -> CacheIdentity:
    """One that differs in no more than what is named."""
    execution = Execution("bf16", kv_dtype, block_size)
    return CacheIdentity(model, tokenizer, template, adapter, execution, Namespace(tenant, salt))


def run(
    cache: PrefixCache,
    who: CacheIdentity,
    ids: Sequence[int],
    *,
    tail: bool = True,
    batch: bool = False,
) -> int:
    """One request from acquire to release, in a step; return what was cached."""
    tokens = encode(ids)
    with cache.open(cache.acquire(who, tokens, batch=batch)) as table:
        missing = len(ids) - table.num_tokens
        table.reserve(missing)
        table.commit(missing)
        table.publish(tokens, tail=tail)
    cache.tick()
    return table.cached_tokens


def fresh(num_tokens: int) -> list[int]:
    """Tokens that nobody has had."""
    return [next(_fresh) for _ in range(num_tokens)]


def flood(cache: PrefixCache, who: CacheIdentity, num_blocks: int, *, batch: bool = False) -> None:
    """Run single requests of one block each until ``num_blocks`` new ones have come."""
    for _ in range(num_blocks):
        run(cache, who, fresh(cache.block_size), batch=batch)
