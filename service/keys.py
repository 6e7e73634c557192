"""API keys: how one is made, what is kept of it, and whose it is.

Knows random bytes, hashes and the names that keys belong to; nothing of files, quotas or HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_ID = re.compile(r"rk-[0-9a-f]{8}")
_ID_LENGTH = 11
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyHash:
    """What is kept of a key. A key is 256 random bits, so one salted SHA-256 is hash enough."""

    id: str
    """The key's readable beginning, which tells keys apart and opens nothing."""
    salt: bytes
    digest: bytes
    created: datetime
    expires: datetime | None = None

    @classmethod
    def new(cls, now: datetime) -> tuple[str, KeyHash]:
        """Make a key, which nobody can show again, and what is kept of it."""
        key_id, salt = f"rk-{secrets.token_hex(4)}", secrets.token_bytes(16)
        key = f"{key_id}-{secrets.token_urlsafe(32)}"
        return key, cls(key_id, salt, _digest(salt, key), now)

    def fits(self, key: str) -> bool:
        """Compare in a time that does not depend on where the two differ."""
        return hmac.compare_digest(_digest(self.salt, key), self.digest)

    def expired(self, now: datetime) -> bool:
        """Whether it opens nothing any more."""
        return self.expires is not None and self.expires <= now

    @property
    def hash(self) -> str:
        """The salt and the digest as the file has them."""
        return f"sha256:{self.salt.hex()}:{self.digest.hex()}"

    @classmethod
    def parse(cls, table: Mapping[str, object]) -> KeyHash:
        """Read the table that a file keeps of a key; raises ValueError in words."""
        key_id, parts = str(table.get("id")), _HASH.fullmatch(str(table.get("hash")))
        if not _ID.fullmatch(key_id):
            raise ValueError(f"id is {table.get('id')!r}; wanted rk- and 8 hex digits")
        if parts is None:
            raise ValueError(f"the hash of {key_id} is not sha256:SALT:DIGEST in hex")
        expires = table.get("expires")
        return cls(
            key_id,
            bytes.fromhex(parts[1]),
            bytes.fromhex(parts[2]),
            _time(table.get("created"), f"created of {key_id}"),
            None if expires is None else _time(expires, f"expires of {key_id}"),
        )


class Keyring:
    """From a key to the name that it belongs to, in a time that tells nothing of other keys."""

    def __init__(self, keys: Iterable[tuple[KeyHash, str]]) -> None:
        self._keys = {key.id: (key, name) for key, name in keys}
        self._nobody = KeyHash.new(datetime.now(UTC))[1], ""  # a key that nobody has
        # Keys that fitted once, by a digest that only this process can make: hashing a key anew
        # under the salt of each would cost every request a microsecond a key.
        self._secret = secrets.token_bytes(32)
        self._known: dict[bytes, tuple[KeyHash, str]] = {}

    def find(self, key: str, now: datetime) -> str | None:
        """Return whose key this is; None if it is nobody's or has expired.

        A key that was not seen before is compared with the one of its id, which is no secret, or
        with nobody's: so the time tells neither which it resembles nor whose it is, and a flood of
        wrong ones costs little where there are many.
        """
        token = hmac.digest(self._secret, _bytes(key), "sha256")
        found = self._known.get(token)
        if found is None:
            found = self._keys.get(key[:_ID_LENGTH], self._nobody)
            if not found[0].fits(key):
                return None
            self._known[token] = found  # so there are no more than keys
        return None if found[0].expired(now) else found[1]


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + _bytes(key)).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # as header values are decoded


def _time(value: object, what: str) -> datetime:
    if not isinstance(value, datetime):
        raise ValueError(f"{what} is {value!r}; wanted a date and time")
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value
