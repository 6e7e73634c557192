"""``radixkv tenants``: gives keys and takes them back. A running server sees it within a second."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from radixkv.errors import InvalidConfig, RadixKVError
from radixkv.service.cli_talk import fail, say
from radixkv.service.keys import KeyHash
from radixkv.service.tenants import SETTINGS, CacheShare, Tenant, read_tenants

tenants_app = typer.Typer(
    help="Give keys to those who may use a server, and take them back.", no_args_is_help=True
)
_DEFAULT_FILE = Path("tenants.toml")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_File = Annotated[Path, typer.Option("--file", help="The file of tenants.")]
_Name = Annotated[str, typer.Argument(help="a-z, 0-9, '_' and '-'.", show_default=False)]


def _limit(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


@tenants_app.command()
def add(
    name: _Name,
    file: _File = _DEFAULT_FILE,
    role: Annotated[str, typer.Option(help="user, or admin, who sees and changes all.")] = "user",
    weight: Annotated[float, typer.Option(help="Share of compute when it is short.")] = 1.0,
    cache_quota: Annotated[
        str | None, _limit("What it may keep cached: blocks, 2GiB or 25%; default: all.")
    ] = None,
    cache_floor: Annotated[
        str | None, _limit("What others cannot push out of it, likewise; default 0.")
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, _limit("Of prompts and answers; default: no limit.")
    ] = None,
    max_concurrent: Annotated[
        int | None, _limit("Choices that run at once, the rest waits; default: no limit.")
    ] = None,
    max_queued: Annotated[
        int | None, _limit("Choices that may wait; default: its share of the server's.")
    ] = None,
) -> None:
    """Add a tenant. Its key is the last line of stdout, and is shown this once."""
    from radixkv.service.tenants_edit import add_tenant

    given: dict[str, object] = {
        "role": role,
        "weight": weight if weight != 1 else None,
        "cache_quota": _share(cache_quota),
        "cache_floor": _share(cache_floor),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_queued": max_queued,
    }
    with _told():
        key = add_tenant(file, name, {k: v for k, v in given.items() if v is not None})
        say(f"{name} is in {file}. Its key, which cannot be shown again:")
        print(key)


@tenants_app.command()
def rotate(
    name: _Name,
    file: _File = _DEFAULT_FILE,
    overlap: Annotated[
        str, typer.Option(help="How long the old keys still work: 30m, 24h, 7d, or 0.")
    ] = "24h",
) -> None:
    """Make another key for a tenant; it is the last line of stdout, and is shown this once."""
    from radixkv.service.tenants_edit import rotate_key

    with _told():
        key = rotate_key(file, name, _duration(overlap))
        say(f"{name} has a new key; older ones end in {overlap}. It cannot be shown again:")
        print(key)


@tenants_app.command()
def remove(
    name: _Name,
    file: _File = _DEFAULT_FILE,
    key: Annotated[
        str | None,
        typer.Option(help="Only this key, by its id, as in rk-3f9a1c0d.", show_default=False),
    ] = None,
) -> None:
    """Take a tenant out, with all its keys; or one key of it."""
    from radixkv.service.tenants_edit import remove_key, remove_tenant

    with _told():
        if key is None:
            remove_tenant(file, name)
            say(f"{name} is not in {file} any more.")
        else:
            remove_key(file, name, key)
            say(f"{key} opens nothing any more.")


@tenants_app.command("list")
def list_tenants(
    file: _File = _DEFAULT_FILE,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show who is in the file, with the ids of their keys."""
    with _told():
        roster = read_tenants(file)
    now = datetime.now(UTC)
    if as_json:
        print(json.dumps([_as_json(tenant, now) for tenant in roster.values()], indent=2))
        return
    table = Table("tenant", "role", "weight", "limits", "keys", box=None, header_style="bold")
    for tenant in roster.values():
        limits = [
            f"{name} {getattr(tenant, name)}"
            for name in SETTINGS
            if name not in ("role", "weight") and _is_set(getattr(tenant, name))
        ]
        table.add_row(
            tenant.name,
            tenant.role,
            f"{tenant.weight:g}",
            "\n".join(limits),
            "\n".join(_key_line(key, now) for key in tenant.keys),
        )
    Console(highlight=False).print(table, markup=False)


def _as_json(tenant: Tenant, now: datetime) -> dict[str, Any]:
    shown = {name: getattr(tenant, name) for name in SETTINGS}
    for name, value in shown.items():
        if isinstance(value, CacheShare):
            shown[name] = str(value)
    keys = [
        {
            "id": key.id,
            "created": key.created.isoformat(),
            "expires": key.expires and key.expires.isoformat(),
            "expired": key.expired(now),
        }
        for key in tenant.keys
    ]
    return {"name": tenant.name} | shown | {"keys": keys}


def _key_line(key: KeyHash, now: datetime) -> str:
    if key.expires is None:
        return f"{key.id} since {key.created:%Y-%m-%d}"
    return f"{key.id} {'ended' if key.expired(now) else 'ends'} {key.expires:%Y-%m-%d %H:%M} UTC"


def _is_set(value: object) -> bool:
    return value is not None and not (isinstance(value, CacheShare) and value.amount == 0)


def _share(text: str | None) -> object:
    """A plain number on the command line is a number of blocks."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([smhd]?)", text.strip())
    if found is None or (not found[2] and found[1] != "0"):
        raise InvalidConfig(f"--overlap is {text!r}; wanted a time such as 30m, 24h or 7d, or 0")
    return timedelta(seconds=int(found[1]) * _UNITS_S.get(found[2], 1))


@contextmanager
def _told() -> Iterator[None]:
    """Say what is wrong, without a trace, and exit with 2."""
    try:
        yield
    except RadixKVError as e:
        fail(str(e))
