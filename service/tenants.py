"""Who may ask a shared server, and for how much: the records of ``tenants.toml`` and its keys.

Knows the file's format and how a key is recognised; nothing of HTTP, of engines, or of how the file
is edited (``tenants_edit.py``) and watched (``tenants_file.py``). One table a tenant::

    [tenants.acme]
    role = "user"                  # user (default) or admin
    weight = 2.0                   # share of the compute when it is short; default 1
    cache_quota = "25%"            # of the pool; or blocks (4096), or bytes ("2GiB"); default: all
    cache_floor = "5%"             # what others cannot push out; default 0
    requests_per_minute = 600      # left out: no limit, as for the three below
    tokens_per_minute = 100_000    # of prompts and answers
    max_concurrent = 16            # choices that run at once, the rest waits
    max_queued = 64                # choices that wait; left out: the tenant's share of --max-queue

    [[tenants.acme.keys]]          # several, so that an old key may overlap a new one
    id = "rk-3f9a1c0d"
    hash = "sha256:<salt>:<digest>"
    created = 2026-01-31T12:00:00Z
    expires = 2026-02-01T12:00:00Z # left out: never

A tenant is its name: whoever is given a name later finds what is still kept under it, in the cache,
and of files and batches.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from radixkv.config import parse_bytes
from radixkv.errors import InvalidConfig
from radixkv.service.engine.origin import LOCAL_TENANT
from radixkv.service.keys import KeyHash, Keyring

Role = Literal["user", "admin"]
ROLES: tuple[Role, ...] = ("user", "admin")
RESERVED_NAMES = frozenset({LOCAL_TENANT, "public", "other", "none"})
"""Names that mean something else in labels and reports."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class CacheShare:
    """A part of the block pool, in the unit in which it was given; ``blocks`` makes it blocks."""

    amount: float
    unit: Literal["blocks", "bytes", "%"]

    @classmethod
    def parse(cls, value: object, name: str) -> CacheShare:
        """Read ``4096`` (blocks), ``"2GiB"`` or ``"25%"``; raises InvalidConfig naming ``name``."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value, "blocks")
        if isinstance(value, str):
            percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
            if percent is not None and float(percent[1]) <= 100:
                return cls(float(percent[1]), "%")
            if percent is None and re.fullmatch(r"\s*\d+(?:\.\d+)?\s*[a-zA-Z]+\s*", value):
                return cls(parse_bytes(value, name), "bytes")
        raise InvalidConfig(
            f'{name} is {value!r}; wanted a number of blocks, a size such as "2GiB", or a share '
            'from "0%" to "100%"'
        )

    def __str__(self) -> str:
        return f"{self.amount:g}{'' if self.unit == '%' else ' '}{self.unit}"

    def blocks(self, *, num_blocks: int, bytes_per_block: int) -> int:
        """Whole blocks of a pool of ``num_blocks``."""
        if self.unit == "%":
            return int(num_blocks * self.amount / 100)
        return int(self.amount if self.unit == "blocks" else self.amount // bytes_per_block)


NO_BLOCKS = CacheShare(0, "blocks")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of a shared server. None of a limit means that there is none."""

    name: str
    role: Role = "user"
    weight: float = 1.0
    cache_quota: CacheShare | None = None
    cache_floor: CacheShare = NO_BLOCKS
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_queued: int | None = None
    keys: tuple[KeyHash, ...] = field(default=(), repr=False)


SETTINGS = tuple(f.name for f in fields(Tenant) if f.name not in ("name", "keys"))
"""What a tenant's table may say beside its keys."""


class Roster(Mapping[str, Tenant]):
    """The tenants of one reading of the file, by name, and the way from a key to its tenant."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._ring = Keyring((key, tenant.name) for tenant in self.values() for key in tenant.keys)

    def find(self, key: str, now: datetime) -> Tenant | None:
        """Return whose key this is; None if it opens nothing (any more)."""
        name = self._ring.find(key, now)
        return None if name is None else self._tenants[name]

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenants)

    def __len__(self) -> int:
        return len(self._tenants)


def read_tenants(file: Path) -> Roster:
    """Read ``tenants.toml``; raises InvalidConfig saying what is wrong and where."""
    try:
        with file.open("rb") as f:
            raw = tomllib.load(f)
    except FileNotFoundError:
        raise InvalidConfig(
            f"tenants is {str(file)!r}: there is no such file; "
            f"`radixkv tenants add NAME --file {file}` makes one"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise InvalidConfig(f"tenants file {file} cannot be read: {e}") from e
    return parse_tenants(raw, str(file))


def parse_tenants(raw: Mapping[str, Any], where: str) -> Roster:
    """Check what TOML made of the file; ``where`` begins each complaint."""
    _refuse_unknown(raw, ("tenants",), where)
    tables = raw.get("tenants", {})
    if not isinstance(tables, dict):
        raise InvalidConfig(f"{where}: tenants is no table; wanted one [tenants.NAME] a tenant")
    roster = Roster(
        _tenant(name, table, f"{where}: [tenants.{name}]") for name, table in tables.items()
    )
    floors = sum(t.cache_floor.amount for t in roster.values() if t.cache_floor.unit == "%")
    if floors > 100:
        raise InvalidConfig(
            f"{where}: all cache_floor together are {floors:g}% of the pool, more than there is"
        )
    seen: set[str] = set()
    for key in (key for tenant in roster.values() for key in tenant.keys):
        if key.id in seen:
            raise InvalidConfig(f"{where}: the key id {key.id} is there twice")
        seen.add(key.id)
    return roster


def check_name(name: str, where: str = "tenant") -> str:
    """Return ``name`` if a tenant may have it; raises InvalidConfig."""
    if name in RESERVED_NAMES:
        raise InvalidConfig(f"{where}: the name {name!r} is reserved")
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{where}: the name {name[:80]!r} is not accepted; wanted 1 to 63 of a-z, 0-9, '_' "
            "and '-', beginning with a letter or digit"
        )
    return name


def checked_settings(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """Check what a tenant's table, or the command line, says beside the keys."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        at = f"{where}: {name}"
        if name == "role":
            if value not in ROLES:
                raise InvalidConfig(f"{at} is {value!r}; accepted: {', '.join(ROLES)}")
            values[name] = value
        elif name == "weight":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidConfig(f"{at} is {value!r}; wanted a number")
            if not 0.001 <= value <= 1000:
                raise InvalidConfig(f"{at} is {value!r}; wanted 0.001 to 1000")
            values[name] = float(value)
        elif name in ("cache_quota", "cache_floor"):
            values[name] = CacheShare.parse(value, at)
        else:
            least = 0 if name == "max_queued" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not least <= value <= 2**40:  # type: ignore[operator]
                raise InvalidConfig(f"{at} is {value!r}; wanted a whole number from {least}")
            values[name] = value
    quota, floor = values.get("cache_quota"), values.get("cache_floor")
    if quota and floor and quota.unit == floor.unit and floor.amount > quota.amount:
        raise InvalidConfig(f"{where}: cache_floor is above cache_quota")
    return values


def _tenant(name: str, table: object, where: str) -> Tenant:
    check_name(name, where)
    if not isinstance(table, dict):
        raise InvalidConfig(f"{where} is no table")
    _refuse_unknown(table, (*SETTINGS, "keys"), where)
    keys = table.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise InvalidConfig(f"{where}: keys is no list of tables; wanted [[tenants.{name}.keys]]")
    settings = checked_settings({k: v for k, v in table.items() if k != "keys"}, where)
    return Tenant(name=name, keys=tuple(_key(key, where) for key in keys), **settings)


def _key(table: Mapping[str, object], where: str) -> KeyHash:
    _refuse_unknown(table, ("id", "hash", "created", "expires"), f"{where}: keys")
    try:
        return KeyHash.parse(table)
    except ValueError as e:
        raise InvalidConfig(f"{where}: keys: {e}") from None


def _refuse_unknown(table: Mapping[str, object], known: Iterable[str], where: str) -> None:
    accepted = list(known)
    for name in table:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise InvalidConfig(
                f"{where}: unknown key {name!r}{hint} Accepted keys: {', '.join(accepted)}"
            )
