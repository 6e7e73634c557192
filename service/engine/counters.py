"""What an engine has done since it started, in numbers that never fall, and what it holds now.

Written by the engine thread; anyone may read the snapshot, which never waits for a step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Final

from radixkv.service.engine.observing import Observer
from radixkv.service.engine.request import Request, Sequence
from radixkv.service.engine.shares import Account
from radixkv.stats import CacheStats

STEP_SIZES: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds by which steps are counted, in tokens."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's part of an EngineStats; for nobody's eyes but its own and an admin's."""

    num_running: int
    num_waiting: int
    requests_total: int
    rejected_total: int
    """Refused when they were submitted, for a full queue or the tenant's own limit; not among
    ``requests_total``."""
    prompt_tokens_total: int
    prompt_tokens_cached_total: int
    prompt_tokens_found_later_total: int
    prompt_tokens_computed_total: int
    recomputed_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int

    @classmethod
    def of(cls, accounts: Seq[Account]) -> TenantStats:
        """Add up a tenant's interactive and batch work."""
        parts = [
            cls(
                a.num_running,
                a.num_waiting,
                a.requests,
                a.rejected,
                a.prompt_tokens,
                a.prompt_tokens_cached,
                a.prompt_tokens_found_later,
                a.prompt_tokens_computed,
                a.recomputed_tokens,
                a.generation_tokens,
                a.preemptions,
            )
            for a in accounts
        ]
        if len(parts) == 1:  # nearly always, and this is on the path of every step
            return parts[0]
        return cls(*(sum(getattr(part, f.name) for part in parts) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot taken between two steps. Tokens and blocks; counters are since the start.

    For requests that were admitted: ``prompt_tokens_total == prompt_tokens_cached_total +
    prompt_tokens_found_later_total + prompt_tokens_computed_total`` once their prefill is done;
    what a preemption made us compute again is in ``recomputed_tokens_total`` and nowhere else
    (METRICS-2).
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    """Kept for reuse and held by nobody."""
    used_blocks: int
    """Held by running requests or pinned."""
    pinned_blocks: int
    """Held by pins, whether or not requests use them too."""
    requests_total: int
    finished: dict[str, int]
    aborted_total: int
    rejected_total: int
    failed_total: int
    prompt_tokens_total: int
    prompt_tokens_cached_total: int
    prompt_tokens_found_later_total: int
    """Computed by others while the request was preempted in the middle of its prompt."""
    prompt_tokens_computed_total: int
    recomputed_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    preemptions: Mapping[str, int]
    """The same by kind: ``swap``, kept in host memory, or ``recompute``, lost where not cached."""
    swapped_out_tokens_total: int
    swapped_out_bytes_total: int
    swapped_in_tokens_total: int
    """Copied back from host memory: no hits, and not computed again."""
    swapped_in_bytes_total: int
    swap_used_bytes: int
    """Host memory that preempted sequences take now."""
    swap_capacity_bytes: int
    """What they may take at most; 0: nothing is swapped."""
    steps_total: int
    step_tokens_total: int
    """Tokens that went through the model, computed again or not."""
    step_sizes: tuple[int, ...]
    """Steps by their tokens: of no more than STEP_SIZES[i], and last of more than all of them."""
    violations_total: int
    """Broken invariants seen by a check; anything but 0 is a bug in radixkv (LEAK-2)."""
    cache: CacheStats
    by_tenant: Mapping[str, TenantStats]

    @property
    def kv_usage(self) -> float:
        """Share of the blocks held by running requests or pinned, 0 to 1."""
        return self.used_blocks / self.num_blocks


class Counters:
    """The engine thread's own, mutable counts."""

    def __init__(self) -> None:
        self.observer = Observer()
        self.clear()

    def clear(self) -> None:
        """Begin again from 0, as if nothing had been asked yet."""
        self.requests = 0
        self.finished: Counter[str] = Counter()
        self.rejected = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.prompt_tokens_found_later = 0
        self.prompt_tokens_computed = 0
        self.recomputed_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.preemptions_by_swap = 0
        self.swapped_out_tokens = 0
        self.swapped_out_bytes = 0
        self.swapped_in_tokens = 0
        self.swapped_in_bytes = 0
        self.steps = self.step_tokens = 0
        self.step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.violations = 0
        self.observer.clear()

    def note_start(self, seq: Sequence) -> None:
        """``seq`` was admitted; only the first admission of a request says what was cached."""
        request = seq.request
        account = request.account
        assert seq.table is not None
        found = seq.table.cached_tokens
        if request.cached_tokens is None:
            request.cached_tokens = found
            request.stream.admitted_s = time.monotonic()
            self.prompt_tokens += len(request.prompt_ids)
            self.prompt_tokens_cached += found
            account.prompt_tokens += len(request.prompt_ids)
            account.prompt_tokens_cached += found
            self.observer.admitted(request, found)
        else:
            later = max(0, min(found, len(request.prompt_ids)) - seq.high)
            self.prompt_tokens_found_later += later
            account.prompt_tokens_found_later += later
            self.observer.found_later(request, later)
        seq.high = max(seq.high, found)

    def note_computed(self, seq: Sequence, start: int, stop: int) -> None:
        """The KV of positions [start, stop) of ``seq`` was computed.

        0 ........... high .......... prompt ....... stop
        |  recomputed  |  new prompt  |  generated
        """
        request, high = seq.request, seq.high
        account, num_prompt = request.account, len(request.prompt_ids)
        account.step_tokens += stop - start
        if start >= high and start >= num_prompt:  # generated, and this is on the path of each
            seq.high = stop
            return
        again = new = 0
        if start < high:
            again = min(stop, high) - start
            self.recomputed_tokens += again
            account.recomputed_tokens += again
        if start < num_prompt:
            new = max(0, min(stop, num_prompt) - max(start, high))
            self.prompt_tokens_computed += new
            account.prompt_tokens_computed += new
        if again or new:
            self.observer.computed(request, new, again)
        if stop > high:
            seq.high = stop

    def note_step(self, num_tokens: int) -> None:
        """A step has put so many tokens through the model."""
        self.steps += 1
        self.step_tokens += num_tokens
        self.step_sizes[bisect_left(STEP_SIZES, num_tokens)] += 1

    def note_generated(self, request: Request, num_tokens: int) -> None:
        """Tokens were generated for ``request``, those of beams that will die included."""
        self.generation_tokens += num_tokens
        request.account.generation_tokens += num_tokens
        if request.stream.first_token_s is None:
            request.stream.first_token_s = time.monotonic()

    def note_preempted(self, seq: Sequence, *, swapped: bool) -> None:
        """``seq`` had to yield its blocks; what they held was saved, or was not."""
        self.preemptions += 1
        self.preemptions_by_swap += swapped
        seq.request.account.preemptions += 1
        self.observer.preempted(seq)

    def snapshot(
        self,
        *,
        num_running: int,
        num_waiting: int,
        cache: CacheStats,
        pinned_blocks: int,
        by_tenant: Mapping[str, TenantStats],
        swap_used_bytes: int,
        swap_capacity_bytes: int,
    ) -> EngineStats:
        """Freeze the counts."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=cache.num_blocks,
            free_blocks=cache.free_blocks,
            cached_blocks=cache.evictable_blocks,
            used_blocks=cache.num_blocks - cache.free_blocks - cache.evictable_blocks,
            pinned_blocks=pinned_blocks,
            requests_total=self.requests,
            finished=dict(self.finished),
            aborted_total=self.finished["abort"],
            rejected_total=self.rejected,
            failed_total=self.failed,
            prompt_tokens_total=self.prompt_tokens,
            prompt_tokens_cached_total=self.prompt_tokens_cached,
            prompt_tokens_found_later_total=self.prompt_tokens_found_later,
            prompt_tokens_computed_total=self.prompt_tokens_computed,
            recomputed_tokens_total=self.recomputed_tokens,
            generation_tokens_total=self.generation_tokens,
            preemptions_total=self.preemptions,
            preemptions={
                "recompute": self.preemptions - self.preemptions_by_swap,
                "swap": self.preemptions_by_swap,
            },
            swapped_out_tokens_total=self.swapped_out_tokens,
            swapped_out_bytes_total=self.swapped_out_bytes,
            swapped_in_tokens_total=self.swapped_in_tokens,
            swapped_in_bytes_total=self.swapped_in_bytes,
            swap_used_bytes=swap_used_bytes,
            swap_capacity_bytes=swap_capacity_bytes,
            steps_total=self.steps,
            step_tokens_total=self.step_tokens,
            step_sizes=tuple(self.step_sizes),
            violations_total=self.violations,
            cache=cache,
            by_tenant=by_tenant,
        )
