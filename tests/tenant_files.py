"""Tenants files as the command line writes them, with the keys that open them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.service.http.auth import Gate
from radixkv.service.tenants_edit import add_tenant
from radixkv.service.tenants_file import TenantsFile

Keys = dict[str, str]


def write_tenants(folder: Path, **tenants: Mapping[str, Any]) -> tuple[Path, Keys]:
    """Write ``tenants.toml``: one tenant a keyword, with its settings; returns it and the keys."""
    file = folder / "tenants.toml"
    return file, {name: add_tenant(file, name, given) for name, given in tenants.items()}


def open_gate(folder: Path, **tenants: Mapping[str, Any]) -> tuple[Gate, Keys]:
    """Return a gate for those tenants, and their keys."""
    file, keys = write_tenants(folder, **tenants)
    return Gate(TenantsFile(file)), keys


def bearer(key: str) -> dict[str, str]:
    """Return the header in which OpenAI's clients send a key."""
    return {"Authorization": f"Bearer {key}"}
