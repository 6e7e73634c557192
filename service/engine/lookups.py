"""What each look-up of a request found, in order: the trace behind its one number of cached tokens.

Knows identities and counts; nothing of how a look-up is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixkv.identity.identity import CacheIdentity

MAX_LOOKUPS = 16
"""Of one request that are kept: the first, which usage reports, and the latest."""

Stopped = Literal["last_token", "not_resident", "host", "no_room", "off"]
"""Why no more was taken from the device's blocks:

last_token    all but the last token, which is computed since its logits are wanted
not_resident  no block goes on as the tokens do
host          what follows lies in host memory
no_room       more was resident, but to hold it would have left no room to run
off           the cache is off, forced to miss, or not read since every position is wanted
"""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One admission of one choice. A request has one, and one more for each preemption of it."""

    choice: int
    identity: CacheIdentity
    queried_tokens: int
    device_tokens: int
    """Found in the device's blocks."""
    host_tokens: int
    """Copied back from host memory, where they were put at a preemption."""
    stopped: Stopped
    resumed: bool
    """It was preempted before; such a look-up is not part of usage (USAGE-3)."""

    @property
    def identity_digest(self) -> str:
        """The identity under which was looked, in hex."""
        return self.identity.digest().hex()

    @property
    def matched_tokens(self) -> int:
        """Tokens that were not computed."""
        return self.device_tokens + self.host_tokens

    @property
    def tier(self) -> Literal["none", "device", "host", "device+host"]:
        """Where they were found."""
        if self.device_tokens and self.host_tokens:
            return "device+host"
        return "device" if self.device_tokens else "host" if self.host_tokens else "none"


def keep(lookups: list[Lookup], lookup: Lookup) -> None:
    """Add to a trace, which forgets the oldest but the first."""
    if len(lookups) >= MAX_LOOKUPS:
        del lookups[1]
    lookups.append(lookup)


def stopped_by(taken: int, found: int, queried: int, *, reads: bool, on_host: bool) -> Stopped:
    """Return why no more than ``taken`` of ``queried`` tokens came from the device's blocks.

    ``found``: tokens that were resident; ``on_host``: some that follow are in host memory.
    """
    if not reads:
        return "off"
    if taken == queried - 1:
        return "last_token"
    if on_host:
        return "host"
    return "no_room" if taken < found else "not_resident"
