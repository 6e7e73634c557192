"""Block keys: chained, the same everywhere, and seeded with who is asking."""

from __future__ import annotations

import subprocess
import sys

from radixkv.identity.identity import CacheIdentity
from radixkv.identity.keys import KEY_BYTES, block_key, block_keys
from radixkv.tokens import encode

MODEL = CacheIdentity.local("m")


def test_a_key_is_long_and_names_all_before_it() -> None:
    """HASH-1: at least 128 bits over (parent, tokens, identity)."""
    tokens = encode(range(48))
    keys = block_keys(MODEL, tokens, 16)
    assert len(keys) == len(set(keys)) == 3
    assert all(len(key) == KEY_BYTES == 16 for key in keys)
    assert keys[0] == block_key(MODEL.digest(), tokens[:64])
    assert keys[2] == block_key(keys[1], tokens[128:])
    changed = block_keys(MODEL, encode([7]) + tokens[4:], 16)
    assert not set(keys) & set(changed)


def test_a_partial_block_has_no_key() -> None:
    assert len(block_keys(MODEL, encode(range(47)), 16)) == 2
    assert block_keys(MODEL, b"", 16) == []


def test_keys_go_on_from_a_parent() -> None:
    tokens = encode(range(64))
    keys = block_keys(MODEL, tokens, 16)
    assert block_keys(MODEL, tokens[128:], 16, parent=keys[1]) == keys[2:]


def test_another_identity_has_other_keys() -> None:
    tokens = encode(range(64))
    other = block_keys(CacheIdentity.local("n"), tokens, 16)
    assert not set(other) & set(block_keys(MODEL, tokens, 16))


def test_all_processes_agree_without_being_told() -> None:
    """HASH-3: no seed per process, no environment variable."""
    program = (
        "from radixkv.identity.identity import CacheIdentity\n"
        "from radixkv.identity.keys import block_keys\n"
        "from radixkv.tokens import encode\n"
        "m = CacheIdentity.local('m')\n"
        "print(m.digest().hex(), *(k.hex() for k in block_keys(m, encode(range(64)), 16)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    mine = [MODEL.digest().hex(), *(k.hex() for k in block_keys(MODEL, encode(range(64)), 16))]
    assert said == {" ".join(mine) + "\n"}


def test_short_keys_would_collide_and_long_ones_do_not() -> None:
    """HASH-1: the birthday test, on keys cut to 16 bits and whole."""
    keys = [block_keys(MODEL, encode([i] * 16), 16)[0] for i in range(3000)]
    assert len({key[:2] for key in keys}) < 3000
    assert len(set(keys)) == 3000
