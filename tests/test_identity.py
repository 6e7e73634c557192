"""The identity: every field of it alone keeps KV apart, and no digest ever brings it together."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity, Execution, Namespace
from radixkv.tokens import encode

BASE = CacheIdentity(
    "model", "tokenizer", "template", "adapter", Execution("bfloat16", "bfloat16", 16)
)
OTHER_SETTINGS: list[tuple[str, Any]] = [
    ("compute_dtype", "float32"),
    ("kv_dtype", "float8"),
    ("layout_version", 2),
    ("numerics_version", 2),
    ("rope_scaling", "yarn:4"),
    ("sliding_window", 4096),
    ("parallel", "tp2"),
    ("deterministic", True),
    ("kv_scales", "s"),
]
CHANGES = [
    ("model", replace(BASE, model="other")),
    ("tokenizer", replace(BASE, tokenizer="other")),
    ("template", replace(BASE, template=None)),
    ("adapter", replace(BASE, adapter=None)),
    ("version", replace(BASE, version=2)),
    ("namespace.tenant", replace(BASE, namespace=Namespace("t"))),
    *(
        (f"execution.{name}", replace(BASE, execution=replace(BASE.execution, **{name: value})))
        for name, value in OTHER_SETTINGS
    ),
]


def publish(cache: PrefixCache, identity: CacheIdentity, tokens: bytes) -> None:
    with cache.open(cache.acquire(identity, tokens)) as table:
        n = len(tokens) // 4 - table.num_tokens
        table.reserve(n)
        table.commit(n)
        table.publish(tokens)


@pytest.mark.parametrize(("name", "other"), CHANGES, ids=[name for name, _ in CHANGES])
def test_each_field_alone_keeps_kv_apart(name: str, other: CacheIdentity) -> None:
    """IDENTITY-1, IDENTITY-2, IDENTITY-5: model, adapter, layout, tenant and all the rest."""
    assert other != BASE
    assert BASE.difference(other) == other.difference(BASE) == (name,)
    assert BASE.digest() != other.digest()
    cache, tokens = PrefixCache(16), encode(range(100))
    publish(cache, BASE, tokens)
    assert cache.lookup(BASE, tokens) == 96
    assert cache.lookup(other, tokens) == 0


def test_equal_records_are_one_key() -> None:
    twin = CacheIdentity(
        "model", "tokenizer", "template", "adapter", Execution("bfloat16", "bfloat16", 16)
    )
    assert twin == BASE and hash(twin) == hash(BASE) and BASE.difference(twin) == ()
    assert twin.encode() == BASE.encode() and twin is not BASE
    for again in (pickle.loads(pickle.dumps(BASE)), copy.deepcopy(BASE)):
        assert again == BASE and {again: 1}[BASE] == 1
    assert BASE != "model"


def test_all_that_differs_is_named() -> None:
    other = replace(
        BASE,
        model="m",
        execution=replace(BASE.execution, kv_dtype="f8", block_size=32),
        namespace=Namespace("t", "s"),
    )
    assert BASE.difference(other) == (
        "model",
        "execution.kv_dtype",
        "execution.block_size",
        "namespace.tenant",
        "namespace.salt",
    )


def test_a_salt_is_not_an_adapter_and_not_a_tenant() -> None:
    """HASH-4: the same string in another field is another identity."""
    x = replace(BASE, adapter="X")
    ids = [
        x,
        replace(BASE, adapter=None, namespace=Namespace("X")),
        replace(BASE, adapter=None, namespace=Namespace("t", "X")),
        replace(BASE, adapter=None, template="X"),
        replace(BASE, adapter=None, namespace=Namespace("X", "t")),
    ]
    cache, tokens = PrefixCache(64), encode(range(50))
    for identity in ids:
        assert cache.lookup(identity, tokens) == 0
        publish(cache, identity, tokens)
    assert cache.stats().identities == len(ids)


def test_nobody_is_public_but_the_public() -> None:
    public = Namespace.public()
    assert public == Namespace()
    assert public not in {Namespace(""), Namespace("public"), Namespace("None"), Namespace("", "")}


def test_a_salt_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant"):
        Namespace(salt="x")


def test_a_hash_of_eight_bits_still_serves_nobody_elses_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HASH-2: 1,000 prompts of 40 identities whose digests nearly all collide."""
    full = CacheIdentity.digest
    monkeypatch.setattr(CacheIdentity, "digest", lambda self: full(self)[:1] * 16)
    ids = [CacheIdentity.local(f"model {i}", 4) for i in range(600)]
    assert len({hash(identity) for identity in ids}) <= 256
    rng = random.Random(1)
    cache = PrefixCache(4000, 4)
    seen: dict[CacheIdentity, list[list[int]]] = {}
    for _ in range(1000):
        identity = rng.choice(ids)
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        told = cache.lookup(identity, encode(prompt), max_cached=len(prompt))
        best = 0
        for old in seen.get(identity, []):
            n = 0
            while n < min(len(old) // 4 * 4, len(prompt)) and old[n] == prompt[n]:
                n += 1
            best = max(best, n)
        assert told == best
        publish(cache, identity, encode(prompt))
        seen.setdefault(identity, []).append(prompt)
    assert cache.check() == []


def test_a_name_is_enough_for_a_bare_cache() -> None:
    assert CacheIdentity.local("a") == CacheIdentity.local("a") != CacheIdentity.local("b")
    assert CacheIdentity.local("a", 32).execution.block_size == 32
