"""Who asks: whose cache a request may read and fill, under which adapter, and how urgent it is."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.identity.identity import Namespace

LOCAL_TENANT = "local"
"""The tenant of a server without keys, and of the library's own user."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request is beside its prompt and its sampling."""

    tenant: str = LOCAL_TENANT
    """The name that authentication gave; never what a request's body says."""
    salt: str | None = None
    """Divides the tenant's cache further; may come from the body."""
    adapter: str | None = None
    """The name under which an adapter was loaded; None is the base model."""
    priority: int = 0
    """Within the tenant: lower goes first, as in vLLM."""
    batch: bool = False
    """Work that nobody waits for: it yields to all that is not, and evicts its own kind first."""
    cache_key: str | None = None
    """OpenAI's ``prompt_cache_key``: a label to report by, never a key that shares."""

    def __post_init__(self) -> None:
        for name in ("tenant", "salt", "adapter", "cache_key"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "tenant"):
                raise InvalidRequest(f"{name} is {value!r:.100}; wanted text", param=name)
        if not isinstance(self.priority, int) or not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(
                f"priority is {self.priority!r:.100}; wanted a 32-bit whole number",
                param="priority",
            )

    @property
    def namespace(self) -> Namespace:
        """Who may share what this request computes."""
        return Namespace(self.tenant, self.salt)


LOCAL = Origin()


def take_origin(given: MutableMapping[str, Any]) -> Origin:
    """Build an Origin from those keywords in ``given`` that are fields of one, and remove them."""
    mine = {f.name: given.pop(f.name) for f in fields(Origin) if f.name in given}
    return Origin(**mine) if mine else LOCAL
