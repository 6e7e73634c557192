"""Leases: a hold on what is resident of a sequence that has no table yet.

Knows what its acquisition counted, so that it can be taken back; nothing of how it was found.
"""

from __future__ import annotations

from radixkv.holder import Holder


class Lease(Holder):
    """A hold on the resident prefix of a sequence: while it lives, no block of it goes.

    ``cached_tokens`` counts whole blocks and the beginning of one more, which is to be copied
    before it is written behind. End it with ``release()`` (idempotent), by leaving its context, or
    by handing it to ``PrefixCache.open``.
    """

    # Tokens asked for, found in a partial block, was it a resumption; set by the cache.
    __slots__ = ("_counted",)

    _counted: tuple[int, int, bool]

    def cancel(self) -> None:
        """Release it, and take back what its acquisition counted: it was looked at, never used."""
        if self.released:
            return
        self._cache._count(self._account, -1, self._counted, self.cached_tokens)
        self.release()
