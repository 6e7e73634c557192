"""Who calls: from the key in a request's headers to a tenant, and what that tenant may do.

Knows keys, roles and open routes; nothing of bodies. Without a tenants file there is one local
tenant, who may do everything: such a server is for the people of one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from radixkv.service.engine.origin import LOCAL_TENANT
from radixkv.service.http.errors import HttpError
from radixkv.service.http.guard import refuse_web_pages
from radixkv.service.http.limits import LimitReached, Room, TenantLimits
from radixkv.service.http.observe import line_of
from radixkv.service.tenant_metrics import TenantCounters
from radixkv.service.tenants import Role, Roster, Tenant
from radixkv.service.tenants_file import TenantsFile

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/version", "/dashboard"})
"""Answered without a key: probes and browsers have none yet, and these say nothing of anybody."""
_SCRAPED = frozenset({"/metrics"})
"""Also answered without a key if the operator says so."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its key says; never as its body does."""

    tenant: str
    role: Role
    limits: TenantLimits | None = None
    """None: nobody counts what the local tenant asks."""

    @property
    def is_admin(self) -> bool:
        """Whether it may see and change what belongs to all."""
        return self.role == "admin"

    @property
    def local(self) -> bool:
        """Whether it was let in without a key, for there are none."""
        return self.limits is None


LOCAL_CALLER = Caller(LOCAL_TENANT, "admin")
CALLER = web.RequestKey("CALLER", Caller)


def caller_of(request: web.Request) -> Caller:
    """Return who sent a request that came through ``authenticating``."""
    return request[CALLER]


def require_admin(request: web.Request) -> Caller:
    """Return the caller if it is an admin, else raise a 403; for routes that change what is all's.

    Where no key is asked for, a web page that a browser of this machine shows is kept out too.
    """
    caller = only_admins(request)
    if caller.local:
        refuse_web_pages(request)
    return caller


def only_admins(request: web.Request) -> Caller:
    """The same for what only shows something, which a web page of elsewhere cannot read."""
    caller = caller_of(request)
    if not caller.is_admin:
        raise HttpError(403, "this needs a key whose role is admin", code="admin_required")
    return caller


class Unauthenticated(HttpError):
    """The request has no key, or none that opens anything."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(401, message, code=code)
        self.headers = {"WWW-Authenticate": 'Bearer realm="radixkv"'}


class Gate:
    """Lets requests in, and keeps what each tenant used of its limits. For the event loop only."""

    def __init__(
        self,
        file: TenantsFile | None = None,
        *,
        open_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_metrics``: show /metrics to whoever asks, for a scraper that has no key."""
        self.open_paths = OPEN_PATHS | _SCRAPED if open_metrics else OPEN_PATHS
        self._file = file
        self._clock = clock
        self._check: Callable[[Roster], None] = lambda _: None
        self._max_running, self._max_choices = 1, 1
        self._limits: dict[str, TenantLimits] = {}
        if file is not None:
            self._use(file.roster)

    @property
    def keyed(self) -> bool:
        """Whether callers need a key."""
        return self._file is not None

    @property
    def roster(self) -> Roster:
        """The tenants as of the last good reading of the file; empty if there is no file."""
        return self._file.roster if self._file is not None else Roster()

    def attach(self, use: Callable[[Roster], None], *, max_running: int, max_choices: int) -> None:
        """Tell ``use`` of every roster from now on, the present one included.

        It may refuse one by InvalidConfig: the present one out of here, a later one into the log.
        ``max_running`` choices run at once on this server, ``max_choices`` run or wait.
        """
        self._check, self._max_running, self._max_choices = use, max_running, max_choices
        self._use(self.roster)

    def reload(self) -> None:
        """Read the file again, now."""
        if self._file is not None:
            self._file.reload(self._use)

    def identify(self, request: web.Request) -> Caller:
        """Return the caller; raises Unauthenticated."""
        if self._file is None:
            return LOCAL_CALLER
        self._file.poll(self._use)
        key = _key_of(request)
        if key is None:
            raise Unauthenticated(
                "You didn't provide an API key. Send it in a header: 'Authorization: Bearer KEY' "
                "or 'x-api-key: KEY'.",
                "missing_api_key",
            )
        tenant = self._file.roster.find(key, datetime.now(UTC))
        if tenant is None:
            raise Unauthenticated("Incorrect API key provided.", "invalid_api_key")
        return Caller(tenant.name, tenant.role, self._limits[tenant.name])

    def still_admits(self, request: web.Request) -> bool:
        """Tell whether a request that was let in would be now, as the same caller: for answers that
        go on for as long as a client listens, and must not outlast its key."""
        try:
            now = self.identify(request)
        except Unauthenticated:
            return False
        caller = caller_of(request)
        return (now.tenant, now.role) == (caller.tenant, caller.role)

    def _use(self, roster: Roster) -> None:
        """Take a roster into use; raises what refuses it, and then nothing has changed.

        What is in flight of a tenant that is gone goes on to its end.
        """
        self._check(roster)
        total = sum(tenant.weight for tenant in roster.values())
        limits = {}
        for name, tenant in roster.items():
            room = Room(self._max_running, self._fair_choices(tenant, total))
            kept = self._limits.get(name)
            if kept is not None:
                kept.change(tenant, room)
            limits[name] = kept or TenantLimits(tenant, room, clock=self._clock)
        self._limits = limits

    def _fair_choices(self, tenant: Tenant, total_weight: float) -> int:
        return max(1, int(self._max_choices * tenant.weight / total_weight))


def authenticating(gate: Gate, counters: TenantCounters | None) -> Middleware:
    """Make the middleware that names the caller, or turns it away before anything is read."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in gate.open_paths:
            return await handler(request)
        caller = request[CALLER] = gate.identify(request)
        if caller.limits is None or counters is None:
            return await handler(request)
        line_of(request).tenant = caller.tenant
        counters.count_call(caller.tenant)
        try:
            if request.method == "POST":
                caller.limits.count_request()
            return await handler(request)
        except LimitReached as e:
            counters.count_refusal(caller.tenant, e.limit["name"])
            raise

    return authenticate


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in the answer to a call that counts what is left."""
    caller = request.get(CALLER)
    if caller is not None and caller.limits is not None and request.method == "POST":
        response.headers.update(caller.limits.headers())


def _key_of(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip() or None
