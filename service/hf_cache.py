"""A prefix cache for any transformers model, without an engine.

    cache = TransformersPrefixCache(model, tokenizer, memory="1GiB")
    with cache.open(input_ids) as past:
        model.generate(input_ids, past_key_values=past)

Knows which blocks a sequence's tokens lie in; what a layer keeps is ``hf_facts``' concern, what a
handle may trust is ``hf_past``'s.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import PrefixCache
from radixkv.config import parse_bytes
from radixkv.errors import InvalidConfig, InvalidRequest
from radixkv.identity.identity import CacheIdentity
from radixkv.lease import Lease
from radixkv.service.hf_facts import inspect_cache
from radixkv.service.hf_identity import TENANT, ModelIdentity, Stamp
from radixkv.service.hf_past import CachedPast
from radixkv.service.hf_pool import LayerPool
from radixkv.service.hf_rows import Declared, rows_of
from radixkv.service.hf_scoring import Scores, score
from radixkv.service.hf_stats import PrefixCacheStats
from radixkv.table import BlockTable
from radixkv.tokens import TOKEN_BYTES, encode


class TransformersPrefixCache:
    """Shares the KV of common prefixes between calls of one transformers model.

    Handles of ``open`` are snapshots: any number may live at once, in several threads, and none
    changes what another sees. The model must be in eval mode; changed weights are noticed (unless
    changed through ``.data``: then ``clear()``) and never meet KV of the old ones.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        memory: str | int = "1GiB",
        block_size: int = 16,
    ) -> None:
        """Allocate ``memory`` bytes for KV where the model's layers are.

        ``tokenizer`` is part of the identity, no more. Reads all weights once for their digest, at
        about 1 GB/s, and runs the model on a few tokens. Raises UnsupportedModel with the reason if
        a prefix of its KV does not suffice to go on, and InvalidConfig for too little memory.
        """
        self.facts = inspect_cache(model)
        self.model = model
        self.block_size = block_size
        num_blocks = parse_bytes(memory, "memory") // (self.facts.token_bytes * block_size)
        if num_blocks < 1:
            raise InvalidConfig(
                f"memory is {memory!r}; one block of {block_size} tokens takes "
                f"{self.facts.token_bytes * block_size} bytes"
            )
        self._prefixes = PrefixCache(num_blocks, block_size)
        self._pool = LayerPool(self.facts.layers, num_blocks, block_size)
        self._lock = threading.RLock()
        self._identity = ModelIdentity(model, tokenizer, self.facts, block_size)
        self._sequences = self._prompt = self._shared = self._computed = self._stored = 0
        self._dropped: deque[Lease] = deque()  # of handles never closed
        before = partial(_before, weakref.ref(self))
        hook = model.register_forward_pre_hook(before, with_kwargs=True)
        weakref.finalize(self, hook.remove)

    # -- handles -----------------------------------------------------------------------------------

    def open(
        self, input_ids: Any, attention_mask: Any = None, *, salt: str | None = None
    ) -> CachedPast:
        """Return a cache that begins with the longest resident prefix of ``input_ids``.

        ``input_ids`` are [tokens] or [rows, tokens]; rows may be padded on the left as
        ``attention_mask`` says. At most all tokens but the last, whose logits are wanted. Give the
        model all of ``input_ids`` or those behind ``past.cached_tokens``: then it computes only
        the latter, and gives their logits. What is new is stored on leaving the context.

        ``salt`` names a part of the cache that shares nothing with the others. InvalidRequest:
        padding elsewhere, or a sequence longer than the model's rope allows.
        """
        rows, pads = rows_of(input_ids, attention_mask)
        self._check(rows.shape[1])
        tokens = [encode(row[pad:]) for row, pad in zip(rows, pads, strict=True)]
        with self._lock, ExitStack() as undo:
            self._release_dropped()
            identity, stamp = self._identity.of(salt)
            leases = [undo.enter_context(self._prefixes.acquire(identity, row)) for row in tokens]
            begin = int((pads + [lease.cached_tokens for lease in leases]).min())
            past = CachedPast(
                self.model.config,
                self.facts,
                Declared(rows, pads, self.model.device),
                begin,
                self._pool.read(self._slots(leases, pads, begin)) if begin else [],
                self,
                partial(self._end, stamp, leases, tokens, pads.tolist()),
            )
            undo.pop_all()  # the handle has them now
            self._sequences += len(tokens)
            self._prompt += sum(map(len, tokens)) // TOKEN_BYTES
            self._shared += past.cached_tokens
        for lease in leases:
            weakref.finalize(past, self._dropped.append, lease)
        return past

    def _slots(
        self, leases: Sequence[Lease], pads: npt.NDArray[np.int64], num_columns: int
    ) -> npt.NDArray[np.int64]:
        """Return where the KV of each row's first columns lies; of padding, anywhere."""
        columns = np.arange(num_columns)
        slots = np.zeros((len(leases), num_columns), np.int64)
        for row, lease, pad in zip(slots, leases, pads, strict=True):
            row[pad:] = self._pool.slots(lease.blocks, columns[: max(0, num_columns - pad)])
        return slots

    def _end(
        self,
        stamp: Stamp,
        leases: list[Lease],
        tokens: list[bytes],
        pads: list[int],
        past: CachedPast,
        store: bool,
    ) -> None:
        with self._lock:
            try:
                known = past.trusted() if store else 0
                if known and self._identity.stamp() != stamp:
                    past.not_stored, known = "the model changed while it was open", 0
                if known and (grown := past.grown()) is not None:
                    tokens = [tokens[0] + encode(grown)]
                for row, (lease, ids, pad) in enumerate(zip(leases, tokens, pads, strict=True)):
                    if pad < known:
                        known_ids = ids[: TOKEN_BYTES * (known - pad)]
                        self._store(past, row, lease.identity, known_ids, pad)
            finally:
                for lease in leases:
                    lease.release()
                self._computed += past.computed_tokens
                self._stored += past.stored_tokens

    def _store(
        self, past: CachedPast, row: int, identity: CacheIdentity, ids: bytes, pad: int
    ) -> None:
        """Put the KV of a row's tokens into the pool, behind what is resident by now."""
        end = len(ids) // TOKEN_BYTES
        lease = self._prefixes.acquire(identity, ids, max_cached=end, resumed=True)
        with self._prefixes.open(lease) as table:
            first = table.num_tokens
            n = self._fitting(table, end - first)
            if n < end - first:
                past.not_stored = "the cache's memory has no more room"
            if not n:
                return
            self._pool.copy(table.reserve(n))
            slots = self._pool.slots(table.blocks, np.arange(first, first + n))
            self._pool.write(slots, past.kv(row, pad + first, pad + first + n))
            table.commit(n)
            table.publish(ids, tail=True)
            past.stored_tokens += n

    def _fitting(self, table: BlockTable, n: int) -> int:
        """Return how many of ``n`` more tokens there is room for."""
        while n > 0:
            short = table.blocks_needed(n) - self._prefixes.available_to(TENANT)
            if short <= 0:
                return n
            last = (table.num_tokens + n - 1) // self.block_size
            n = (last + 1 - short) * self.block_size - table.num_tokens
        return 0

    def _release_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft().release()

    # -- scores ------------------------------------------------------------------------------------

    @overload
    def score(
        self,
        prefix_ids: Any,
        suffixes: Sequence[Any],
        *,
        per_token: Literal[False] = False,
        batch_size: int | None = None,
        salt: str | None = None,
    ) -> list[float]: ...

    @overload
    def score(
        self,
        prefix_ids: Any,
        suffixes: Sequence[Any],
        *,
        per_token: Literal[True],
        batch_size: int | None = None,
        salt: str | None = None,
    ) -> list[list[float]]: ...

    def score(
        self,
        prefix_ids: Any,
        suffixes: Sequence[Any],
        *,
        per_token: bool = False,
        batch_size: int | None = None,
        salt: str | None = None,
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each suffix behind the prefix, or those of its tokens.

        The prefix is computed once, and stored; suffixes are run in batches of ``batch_size`` rows
        (None: as many as hold about 256 MiB of KV) and not stored. Sums are natural logarithms.
        """
        prefix, _ = rows_of(prefix_ids)
        if len(prefix) > 1:
            raise InvalidRequest(f"prefix_ids has {len(prefix)} rows; wanted one")
        if not suffixes:
            return []
        parts = [rows_of(suffix)[0][0] if len(suffix) else [] for suffix in suffixes]
        self._check(prefix.shape[1] + max(map(len, parts)))
        with self.open(prefix, salt=salt) as past:
            found: Scores = score(
                self.model,
                self.facts,
                past,
                torch.from_numpy(prefix),
                [torch.as_tensor(part, dtype=torch.long) for part in parts],
                batch_size,
            )
        with self._lock:  # open() has counted the prefix once
            self._sequences += len(parts) - 1
            self._prompt += found.prompt_tokens - prefix.shape[1]
            self._shared += found.shared_tokens
            self._computed += found.computed_tokens
        return found.of_tokens if per_token else [sum(row) for row in found.of_tokens]

    # -- the whole ---------------------------------------------------------------------------------

    def stats(self) -> PrefixCacheStats:
        """Return counters and gauges; what open handles compute counts when they end."""
        with self._lock:
            stats = self._prefixes.stats()
            return PrefixCacheStats(
                sequences=self._sequences,
                prompt_tokens=self._prompt,
                cached_tokens=self._shared,
                computed_tokens=self._computed,
                stored_tokens=self._stored,
                evicted_blocks=stats.evicted_blocks,
                num_blocks=stats.num_blocks,
                cached_blocks=stats.cached_blocks,
                memory_bytes=self._pool.num_bytes,
            )

    def clear(self) -> None:
        """Forget all KV, and read the weights anew. Raises CacheBusy while handles are open."""
        with self._lock:
            self._release_dropped()
            self._prefixes.reset()
            self._identity.forget()

    def check(self) -> list[str]:
        """Return each broken invariant of the blocks in words. O(blocks)."""
        with self._lock:
            self._release_dropped()
            return self._prefixes.check()

    def _check(self, num_tokens: int) -> None:
        limit = self.facts.limit
        if limit is not None and num_tokens > limit:
            raise InvalidRequest(
                f"{num_tokens} tokens: beyond {limit} this model's rope turns all keys otherwise"
            )


def _before(
    owner: weakref.ref[TransformersPrefixCache], model: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    """Let a handle of ours see a call of the model that it is given to."""
    if (cache := owner()) is None:
        return None
    given = dict(zip(cache.facts.parameters, args, strict=False)) | kwargs
    past = given.get("cache", given.get("past_key_values"))
    if not isinstance(past, CachedPast) or past.owner is not cache or not past.watching:
        return None
    return (), past.before(model, given)
