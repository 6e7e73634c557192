"""Keys of single blocks, for those who cannot see the tree: tiers, events, other processes.

Knows an identity's digest and token bytes; nothing of blocks or trees. A key names a block and all
before it: ``key(i) = xxh3_128(key(i-1) + tokens of block i)``, and ``key(-1)`` is the identity's
digest. The same in every process, without a seed. A key only finds a candidate: whoever receives
one compares the tokens and the identity before using what it names.
"""

from __future__ import annotations

import xxhash

from radixkv.identity.identity import CacheIdentity

KEY_BYTES = 16


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of the block that holds ``tokens`` and follows the one with key ``parent``."""
    return xxhash.xxh3_128_digest(parent + tokens)


def block_keys(
    identity: CacheIdentity, tokens: bytes, block_size: int, parent: bytes | None = None
) -> list[bytes]:
    """Return the keys of the whole blocks of ``tokens``, in order.

    ``parent`` is the key of the block before ``tokens``; None when they begin the sequence.
    """
    key = identity.digest() if parent is None else parent
    stride = 4 * block_size
    keys = []
    for start in range(0, len(tokens) - stride + 1, stride):
        key = block_key(key, tokens[start : start + stride])
        keys.append(key)
    return keys
