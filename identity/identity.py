"""What makes two KV blocks interchangeable: the record that requests must agree on to share them.

Knows names, digests and settings; nothing of how they are gathered (``fingerprint.py``) or of
tokens. Two requests may share KV if and only if their identities are equal and their tokens are.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field

from radixkv.identity import canonical

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share: everybody, or one authenticated tenant, divided further by a salt.

    The tenant comes from the server's authentication. A salt may come from the client, and so it
    is never enough alone: without a tenant it would let a caller choose whose cache to read.
    """

    tenant: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if self.salt is not None and self.tenant is None:
            raise ValueError("a salt needs a tenant: it divides one tenant's cache, no more")

    @classmethod
    def public(cls) -> Namespace:
        """Return the namespace of everybody; no tenant's name or salt equals it."""
        return cls()


@dataclass(frozen=True, slots=True)
class Execution:
    """How KV is computed and laid out: the same tokens give other bytes under other settings."""

    compute_dtype: str
    kv_dtype: str
    block_size: int
    layout_version: int = 1
    numerics_version: int = 1
    rope_scaling: str | None = None
    sliding_window: int | None = None
    parallel: str | None = None
    deterministic: bool = False
    kv_scales: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CacheIdentity:
    """A frozen, versioned record; equality is that of the whole record, never of a digest.

    ``model``, ``tokenizer``, ``template`` and ``adapter`` are digests of contents, not names.
    The encoding is made once, so hashing is a field read and comparing is one memcmp: the record
    is a dictionary key on the path of every request.
    """

    model: str
    tokenizer: str
    template: str | None
    adapter: str | None
    execution: Execution
    namespace: Namespace = field(default_factory=Namespace.public)
    version: int = 1
    _encoded: bytes = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_encoded", canonical.encode(self))
        object.__setattr__(self, "_hash", int.from_bytes(self.digest()[:8]))

    @classmethod
    def local(cls, name: str, block_size: int = 16) -> CacheIdentity:
        """Return a plain identity for a bare cache whose user vouches that ``name`` says it all."""
        execution = Execution("unspecified", "unspecified", block_size)
        return cls(f"local:{name}", "none", None, None, execution)

    def encode(self) -> bytes:
        """Return the canonical encoding: equal exactly when the records are equal."""
        return self._encoded

    def digest(self) -> bytes:
        """Return 16 bytes of blake2b of the encoding. Shortens a look-up; never decides one."""
        return hashlib.blake2b(self._encoded, digest_size=DIGEST_BYTES).digest()

    def difference(self, other: CacheIdentity) -> tuple[str, ...]:
        """Return the dotted names of the fields that differ, such as ``execution.kv_dtype``."""
        return tuple(_difference(self, other, ""))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, CacheIdentity):
            return NotImplemented
        return self._encoded == other._encoded


def _difference(a: object, b: object, prefix: str) -> list[str]:
    names = []
    for f in dataclasses.fields(a):  # type: ignore[arg-type]
        if not f.compare:
            continue
        mine, theirs = getattr(a, f.name), getattr(b, f.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            names += _difference(mine, theirs, f"{prefix}{f.name}.")
        elif type(mine) is not type(theirs) or mine != theirs:
            names.append(prefix + f.name)
    return names
