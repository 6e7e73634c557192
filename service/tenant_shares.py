"""Shares an engine out among tenants: whose turn it is when compute is short, whose blocks stay.

Knows what a roster promises and what a pool holds; nothing of keys or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.errors import EngineDead, InvalidConfig
from radixkv.service.engine.shares import TenantShare
from radixkv.service.tenants import Tenant

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine

LOG = logging.getLogger("radixkv.tenants")


class Shares:
    """Keeps an engine's shares as the latest roster has them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: set[str] = set()

    def use(self, tenants: Mapping[str, Tenant]) -> None:
        """Take ``tenants`` into use; never waits. Raises InvalidConfig, and then nothing changed.

        A tenant that is gone keeps nothing: its pins end, and what it had cached is the first to
        go.
        """
        claims = claims_on(
            tenants,
            num_blocks=self._engine.stats().num_blocks,
            bytes_per_block=self._engine.bytes_per_block,
            public_blocks=self._engine.public.kept_blocks,
        )
        gone = self._known - set(tenants)
        for name, tenant in tenants.items():
            share = TenantShare(tenant.weight, max_running=tenant.max_concurrent)
            self._engine.set_tenant_share(name, share)
        for name in gone:
            self._engine.set_tenant_share(name, TenantShare())
        blocks: dict[str | None, tuple[int | None, int]] = {
            name: (claim.quota, claim.floor) for name, claim in claims.items()
        }
        blocks |= dict.fromkeys(gone, (0, 0))
        self._engine.set_cache_shares(blocks).add_done_callback(_log_failure)
        self._engine.pins.set_shares(
            {name: tenant.weight for name, tenant in tenants.items()},
            {name: claim.floor for name, claim in claims.items()},
        )
        self._known |= set(tenants)


@dataclass(frozen=True, slots=True)
class CacheClaim:
    """What a tenant may keep of the pool, in blocks."""

    quota: int | None
    """What it is over, it loses first when others need blocks; None is no bound."""
    floor: int
    """What others cannot take from it."""


def claims_on(
    tenants: Mapping[str, Tenant], *, num_blocks: int, bytes_per_block: int, public_blocks: int = 0
) -> dict[str, CacheClaim]:
    """Turn what the file says into blocks; raises InvalidConfig where the pool has too few.

    ``public_blocks`` of the pool are kept for the prompts that all share.
    """
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
    left = num_blocks - public_blocks
    if promised > left:
        largest = ", ".join(
            f"{name} {claim.floor}"
            for name, claim in sorted(claims.items(), key=lambda item: -item[1].floor)[:5]
        )
        raise InvalidConfig(
            f"the tenants' cache_floor together are {promised} blocks ({largest}), and the pool "
            f"has {left} for them; lower them, or give the server more --kv-memory"
        )
    return claims


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, EngineDead):
        LOG.error("the tenants' shares of the cache could not be set: %s", error)
