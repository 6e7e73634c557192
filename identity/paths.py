"""Digests of whole paths, made as the tokens come: to recognise a path later without keeping it.

Knows an identity and token bytes; nothing of blocks. A digest never decides what may be reused.
"""

from __future__ import annotations

from typing import TypeAlias

import xxhash

from radixkv.identity.identity import CacheIdentity

PathHash: TypeAlias = xxhash.xxh3_64
"""The state after some tokens: ``copy()`` it, ``update(tokens)``, ask for its ``intdigest()``.

However the tokens are cut into pieces, the same path has the same digest.
"""


def begin_path(identity: CacheIdentity) -> PathHash:
    """Return the state before the first token of a path of ``identity``."""
    return xxhash.xxh3_64(identity.digest())


def digest_prefix(tokens: bytes) -> bytes:
    """Return 128 bits of the digest of ``tokens``."""
    return xxhash.xxh3_128_digest(tokens)
