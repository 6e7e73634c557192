"""Changes ``tenants.toml`` as a careful person would: comments kept, nothing half written.

Knows how the file is laid out and replaced; what may stand in it is ``tenants.py``'s affair, which
checks every change before it is kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomlkit
from filelock import FileLock, Timeout
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Table

from radixkv.errors import InvalidConfig
from radixkv.service.keys import KeyHash
from radixkv.service.tenants import check_name, checked_settings, parse_tenants

_HEADER = "Tenants of a radixkv server; change it with `radixkv tenants`, or by hand."
_LOCK_TIMEOUT_S = 10.0


def add_tenant(file: Path, name: str, settings: Mapping[str, object]) -> str:
    """Write a new tenant, and the file if there is none; returns the key, shown this once."""
    check_name(name)
    checked_settings(settings, f"tenant {name}")
    with _editing(file, create=True) as tenants:
        if name in tenants:
            raise InvalidConfig(
                f"{file} has a tenant {name} already; `radixkv tenants rotate {name}` makes "
                "another key"
            )
        table = tomlkit.table()
        table.add("role", "user")
        for setting, value in settings.items():
            table[setting] = value
        table.add(tomlkit.nl())
        key, kept = KeyHash.new(_now())
        table.add("keys", tomlkit.aot())
        _keys(table).append(_key_table(kept))
        tenants.add(name, table)
    return key


def rotate_key(file: Path, name: str, overlap: timedelta) -> str:
    """Give ``name`` a new key; those that it has open nothing once ``overlap`` has passed."""
    with _editing(file) as tenants:
        table, now = _tenant(tenants, name, file), _now()
        ends = now + overlap
        if "keys" not in table:
            table.add("keys", tomlkit.aot())
        keys = _keys(table)
        for i in reversed(range(len(keys))):
            old = KeyHash.parse(keys[i].unwrap())
            if overlap <= timedelta(0) or old.expired(now):
                del keys[i]
            elif old.expires is None or old.expires > ends:
                keys[i]["expires"] = ends
        key, kept = KeyHash.new(now)
        keys.append(_key_table(kept))
    return key


def remove_tenant(file: Path, name: str) -> None:
    """Take ``name`` and all its keys out of the file."""
    with _editing(file) as tenants:
        _tenant(tenants, name, file)
        tenants.remove(name)


def remove_key(file: Path, name: str, key_id: str) -> None:
    """Take one key of ``name`` out of the file."""
    with _editing(file) as tenants:
        keys = _keys(_tenant(tenants, name, file))
        found = [i for i, key in enumerate(keys) if key.get("id") == key_id]
        if not found:
            raise InvalidConfig(f"{name} has no key {key_id} in {file}")
        del keys[found[0]]


@contextmanager
def _editing(file: Path, *, create: bool = False) -> Iterator[Table]:
    """Give the table of all tenants; what was changed is checked, then replaces the file at once.

    One at a time: a lock beside the file, since the file itself is replaced.
    """
    file = file.resolve()  # a link stays a link
    if not file.parent.is_dir():
        raise InvalidConfig(f"tenants is {str(file)!r}: there is no such folder")
    try:
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=_LOCK_TIMEOUT_S):
            document = _read(file, create)
            if "tenants" not in document:
                document.add("tenants", tomlkit.table(is_super_table=True))
            tenants = document["tenants"]
            if not isinstance(tenants, Table):
                raise InvalidConfig(f"{file}: tenants is no table")
            yield tenants
            parse_tenants(document.unwrap(), str(file))
            _replace(file, tomlkit.dumps(document))
    except Timeout:
        raise InvalidConfig(f"somebody else is editing {file}; try again") from None
    except OSError as e:
        raise InvalidConfig(f"tenants file {file} cannot be written: {e}") from e


def _read(file: Path, create: bool) -> tomlkit.TOMLDocument:
    try:
        document = tomlkit.parse(file.read_text("utf-8"))
    except FileNotFoundError:
        if not create:
            raise InvalidConfig(
                f"tenants is {str(file)!r}: there is no such file; `radixkv tenants add NAME "
                f"--file {file}` makes one"
            ) from None
        document = tomlkit.document()
        document.add(tomlkit.comment(_HEADER))
        return document
    except (UnicodeDecodeError, TOMLKitError) as e:
        raise InvalidConfig(f"tenants file {file} cannot be read: {e}") from e
    parse_tenants(document.unwrap(), str(file))
    return document


def _replace(file: Path, text: str) -> None:
    """Write ``text`` beside ``file`` and put it in its place.

    A new file has mode 0600 from the first byte on. One that was there stays who's and as readable
    as it was: else a server of another user could not read on, and would let old keys in.
    """
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            if file.exists():
                shutil.copymode(file, name)
                _keep_owner(file, name)
            f.flush()
            os.fsync(f.fileno())
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _keep_owner(file: Path, name: str) -> None:
    if hasattr(os, "chown"):
        found = os.stat(file)
        with suppress(PermissionError):  # for root only
            os.chown(name, found.st_uid, found.st_gid)


def _tenant(tenants: Table, name: str, file: Path) -> Any:
    if name not in tenants:
        known = ", ".join(tenants) or "none"
        raise InvalidConfig(f"{file} has no tenant {name!r}; there are: {known}")
    return tenants[name]


def _keys(table: Any) -> AoT:
    keys = table["keys"]
    if not isinstance(keys, AoT):
        raise InvalidConfig("keys is written inline; make it [[tenants.NAME.keys]] tables")
    return keys


def _key_table(kept: KeyHash) -> Table:
    table = tomlkit.table()
    table.add("id", kept.id)
    table.add("hash", kept.hash)
    table.add("created", kept.created)
    return table


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
