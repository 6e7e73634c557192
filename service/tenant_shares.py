"""Shares an engine out among tenants: whose turn it is when compute is short, whose blocks stay.

Knows what a roster promises and what a pool holds; nothing of keys or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.errors import InvalidConfig
from radixkv.service.tenants import Tenant

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


class Shares:
    """Keeps an engine's shares as the latest roster has them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def use(self, tenants: Mapping[str, Tenant]) -> None:
        """Take ``tenants`` into use; raises InvalidConfig, and then nothing has changed."""
        claims_on(
            tenants,
            num_blocks=self._engine.stats().num_blocks,
            bytes_per_block=self._engine.bytes_per_block,
        )


@dataclass(frozen=True, slots=True)
class CacheClaim:
    """What a tenant may keep of the pool, in blocks."""

    quota: int | None
    """What it is over, it loses first when others need blocks; None is no bound."""
    floor: int
    """What others cannot take from it."""


def claims_on(
    tenants: Mapping[str, Tenant], *, num_blocks: int, bytes_per_block: int
) -> dict[str, CacheClaim]:
    """Turn what the file says into blocks; raises InvalidConfig where the pool has too few."""
    claims = {}
    for name, tenant in tenants.items():
        size = {"num_blocks": num_blocks, "bytes_per_block": bytes_per_block}
        quota = None if tenant.cache_quota is None else tenant.cache_quota.blocks(**size)
        floor = tenant.cache_floor.blocks(**size)
        if quota is not None and floor > quota:
            raise InvalidConfig(
                f"tenant {name}: cache_floor is {floor} blocks and cache_quota {quota}; wanted a "
                "floor of no more than the quota"
            )
        claims[name] = CacheClaim(quota, floor)
    promised = sum(claim.floor for claim in claims.values())
    if promised > num_blocks:
        largest = ", ".join(
            f"{name} {claim.floor}"
            for name, claim in sorted(claims.items(), key=lambda item: -item[1].floor)[:5]
        )
        raise InvalidConfig(
            f"the tenants' cache_floor together are {promised} blocks ({largest}), and the pool "
            f"has {num_blocks}; lower them, or give the server more --kv-memory"
        )
    return claims
