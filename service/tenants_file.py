"""Follows ``tenants.toml`` while a server runs: reads it anew when it has changed.

Knows the file and when it was last looked at; who takes a new roster into use may refuse it. A file
that cannot be used changes nothing, and the log says why: a typo must not lock everybody out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from radixkv.errors import InvalidConfig
from radixkv.service.tenants import Roster, read_tenants

LOG = logging.getLogger("radixkv.tenants")
_LOOK_EVERY_S = 1.0


class TenantsFile:
    """A roster and the file that it came from. Used by one thread (the server's event loop)."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read ``file``; raises InvalidConfig if it cannot be used, or nobody is in it."""
        self.file = file
        self._clock = clock
        self._seen = _version(file)
        self.roster = read_tenants(file)
        if not any(tenant.keys for tenant in self.roster.values()):
            raise InvalidConfig(
                f"tenants file {file} has no key that opens anything; make one with "
                f"`radixkv tenants add NAME --file {file}`"
            )
        self._looked_s = clock()

    def poll(self, use: Callable[[Roster], None]) -> None:
        """Look at the file, at most once a second, and read it if it has changed.

        ``use`` is given the new roster before it counts; if it raises InvalidConfig the old one
        stays.
        """
        now = self._clock()
        if now - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now
        if _version(self.file) != self._seen:
            self.reload(use)

    def reload(self, use: Callable[[Roster], None]) -> bool:
        """Read the file now; False, and a line in the log, if it cannot be used."""
        self._seen = _version(self.file)
        try:
            if self._seen is not None and self._seen[1] == 0:  # some editors empty it, then write
                raise InvalidConfig(f"tenants file {self.file} is empty")
            roster = read_tenants(self.file)
            use(roster)
        except InvalidConfig as e:
            LOG.error("tenants as before, for the file cannot be used: %s", e)
            return False
        self.roster = roster
        LOG.info("tenants read anew", extra={"fields": {"tenants": len(roster)}})
        return True


def _version(file: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None while there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
