"""The engine's cache as seen from outside the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.service.engine.request import encode
from radixkv.stats import CacheStats


class CacheView:
    """Look into the cache, or empty it. Everything but ``stats`` waits for the end of a step."""

    def __init__(self, core: EngineCore, identity: Callable[[Origin], CacheIdentity]) -> None:
        self._core = core
        self._identity = identity

    def stats(self) -> CacheStats:
        """What was asked for, found, kept and evicted, as of the last step; never waits."""
        return self._core.stats.cache

    def lookup(self, token_ids: Sequence[int], *, origin: Origin = LOCAL) -> int:
        """Tokens that a request with this prompt, sent now, would find; touches nothing."""
        tokens, identity = encode(token_ids), self._identity(origin)
        return self._core.call(lambda: self._core.cache.lookup(identity, tokens)).result()

    def reset(self) -> int:
        """Forget everything; returns the blocks freed. Raises CacheBusy while requests run."""
        return self._core.call(self._core.cache.reset).result()
