"""Reads settings once, from a TOML file and from flags; knows nothing of what they do.

The file is flat: every flag of ``radixkv serve`` is a key of the same name (``--kv-memory`` is
``kv_memory``; ``kv-memory`` is understood too). Flags win over the file, the file over defaults.
Records and their limits live in ``radixkv/config.py``.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from radixkv.config import EngineConfig, ServerConfig, parse_bytes
from radixkv.errors import InvalidConfig

_SIZES = ("kv_memory", "swap_memory", "max_body")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "str | None": ((str,), "text"),
    "tuple[str, ...]": ((list, tuple), "a list of texts"),
    "int": ((int,), "a whole number"),
    "int | None": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that ``radixkv serve`` is told."""

    engine: EngineConfig
    server: ServerConfig
    insecure_remote: bool = False
    """Allows a host that other machines reach where no key is asked for."""
    tenants: str | None = None
    """The file of those who have keys; without it whoever reaches the server may use it."""
    public_prompts: tuple[str, ...] = ()
    """System prompts whose cached KV all tenants share."""
    open_metrics: bool = False
    """Shows /metrics without a key where keys are asked for."""
    metrics_compat: str = "none"
    """``vllm`` also shows metrics under vLLM's names, for dashboards and routers made for it."""
    vllm_metric_names: bool = False
    """The same as ``metrics_compat = "vllm"``, by its older name."""
    inspect_text: bool = False
    """Shows admins the text of all tenants' cached prompts; without it only that of their own."""
    batch_dir: str | None = None
    """Where uploaded files and batches are kept; without it there are none over HTTP."""
    adapter_dir: str | None = None
    """Lets admins load adapters that lie beneath this directory; without it none over HTTP."""

    def __post_init__(self) -> None:
        if self.metrics_compat not in ("none", "vllm"):
            raise InvalidConfig(
                f"metrics_compat is {self.metrics_compat!r}; wanted 'none' or 'vllm'"
            )

    @property
    def vllm_metrics(self) -> bool:
        """Whether vLLM's names are shown too."""
        return self.vllm_metric_names or self.metrics_compat == "vllm"


def load_settings(file: Path | None, flags: Mapping[str, object]) -> Settings:
    """Merge ``flags`` (None: not given) over ``file``; raise InvalidConfig naming what is wrong."""
    values = read_toml(file) if file is not None else {}
    values |= {
        name: _typed(name, value, "--" + name.replace("_", "-"))
        for name, value in flags.items()
        if value is not None
    }
    settings = Settings(
        engine=EngineConfig(**_part(values, EngineConfig)),
        server=ServerConfig(**_part(values, ServerConfig)),
        **_part(values, Settings),
    )
    _refuse_remote(settings)
    return settings


def read_toml(file: Path) -> dict[str, object]:
    """Read a settings file; unknown keys, tables and values of the wrong type are refused."""
    try:
        with file.open("rb") as f:
            raw = tomllib.load(f)
    except FileNotFoundError:
        raise InvalidConfig(f"config is {str(file)!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise InvalidConfig(f"config {file} cannot be read: {e}") from e
    known = _kinds()
    values: dict[str, object] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            raise InvalidConfig(_unknown(key, name, value, sorted(known), str(file)))
        if name in values:
            raise InvalidConfig(f"{file}: {name} is given twice")
        values[name] = _typed(name, value, f"{file}: {key}")
    return values


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than localhost is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def setting_names() -> list[str]:
    """Return every key that the file accepts, each also a flag."""
    return sorted(_kinds())


def _kinds() -> dict[str, tuple[type, str]]:
    """Name -> (the record that it belongs to, its type as written there)."""
    owners: tuple[type, ...] = (EngineConfig, ServerConfig, Settings)
    return {
        field.name: (owner, str(field.type))
        for owner in owners
        for field in fields(owner)
        if str(field.type) in _KINDS
    }


def _part(values: Mapping[str, object], owner: type) -> dict[str, Any]:
    kinds = _kinds()
    return {name: value for name, value in values.items() if kinds[name][0] is owner}


def _typed(name: str, value: object, origin: str) -> object:
    """Check the type of one value, and read sizes such as ``"1GiB"``."""
    if name in _SIZES and isinstance(value, str | int) and not isinstance(value, bool):
        return parse_bytes(value, origin)
    accepted, wanted = _KINDS[_kinds()[name][1]]
    if name in _SIZES:
        wanted = 'a whole number of bytes or a size such as "512MiB", "1.5GiB" or "2GB"'
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise InvalidConfig(f"{origin} is {value!r}; wanted {wanted}")
    if isinstance(value, list | tuple):
        if not all(isinstance(item, str) and item for item in value):
            raise InvalidConfig(f"{origin} holds something that is no text; wanted {wanted}")
        return tuple(value)
    return value


def _unknown(key: str, name: str, value: object, known: list[str], file: str) -> str:
    if isinstance(value, dict):
        return f"{file}: [{key}] is a table; settings are plain keys at the top of the file"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{file}: unknown key {key!r}{hint} Accepted keys: {', '.join(known)}"


def _refuse_remote(settings: Settings) -> None:
    host = settings.server.host
    if settings.tenants is None and not settings.insecure_remote and not is_loopback(host):
        raise InvalidConfig(
            f"host is {host!r}, which other machines may reach, and this server asks nobody who "
            "they are; give keys to those who may with --tenants FILE, use 127.0.0.1, or add "
            "--insecure-remote if the network itself is trusted"
        )
