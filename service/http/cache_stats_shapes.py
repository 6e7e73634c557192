"""The form of GET /v1/cache/stats; knows no numbers.

What is not known, or is another's affair, is null and never 0.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from radixkv.service.engine.history import By


class Blocks(TypedDict):
    """Blocks of the pool by state; free + cached + used = total.

    `cached` are evictable, `resident` those in the tree, in use or not. For a tenant `total` and
    `free` are null, and `used` are those of its resident ones that its requests or pins hold.
    """

    total: int | None
    free: int | None
    cached: int
    used: int
    resident: int
    pinned: int | None
    quota: int | None
    floor: int | None


class CacheTokens(TypedDict):
    """Token counters since the start; none ever falls, and hit <= queried."""

    queried: int
    hit: int
    hit_inside_a_block: int | None
    computed: int | None
    recomputed_after_preemption: int | None


class CacheCounts(TypedDict):
    """Block counters since the start. `evicted` were given up, `evictions_caused` made others go.

    Of a whole server both are the same blocks.
    """

    published: int | None
    deduplicated: int | None
    evicted: int
    evictions_caused: int
    copied_on_write: int | None
    resets: int | None


class TierTokens(TypedDict):
    """Tokens by tier. `host` is null, for no prompt is found there: host memory keeps what was
    preempted, and gives it back to the request that it was taken from, and to no other."""

    device: int
    host: int | None


class WindowTokens(TypedDict):
    """Tokens counted in a window. Every queried token is a hit, found later or computed once its
    request is admitted and its prompt done; what is computed again counts in no rate, nor does what
    was restored: copied back from host memory, where the preemption had put it.
    `lost_at_a_border`: of those not hit, what is behind the last whole block of a public prefix
    (`below_block` of `missed`); known by tenant only. Answers are the same wherever a hit ends, so
    no other token of a hit is lost."""

    queried: int
    hit: TierTokens
    found_later: int
    computed: int
    recomputed_after_preemption: int
    restored_after_preemption: int
    generated: int
    lost_at_a_border: int | None


class Evictions(TypedDict):
    """Blocks that a tenant gave up, and that it made anybody give up."""

    suffered: int
    caused: int


class WindowRow(TypedDict):
    """The counts of one key. `other`: of all the keys for which there was no room.

    `hit_rate` is hit by queried tokens, null if none were queried. `evictions` and `missed` are
    known by tenant only. `missed`: queried tokens that were not hit, by reason, those without
    tokens left out.
    """

    tenant: str | None
    identity: str | None
    prompt_cache_key: str | None
    other: bool
    requests: int
    tokens: WindowTokens
    hit_rate: float | None
    preemptions: int
    evictions: Evictions | None
    missed: dict[str, int] | None


class WindowReply(TypedDict):
    """What was counted between two Unix times. Slots of `resolution_s` are taken whole, so it may
    be shorter than asked; it never begins before the server did."""

    asked_s: float
    from_time: float
    to_time: float
    interval_s: float
    resolution_s: int
    denominator: Literal["queried_tokens"]
    by: By
    rows: list[WindowRow]


class WasteReply(TypedDict):
    """Room that holds nothing: reserved by running requests, and behind the tails of paths; and
    what the tree itself takes of the host's memory (an estimate). Null where it was not counted."""

    reserved_tokens: int
    tail_tokens: int | None
    metadata_bytes: int | None


class Quantiles(TypedDict):
    """A distribution, in seconds; sampled. The quantiles are null while there is no sample."""

    samples: int
    p50: float | None
    p90: float | None
    p99: float | None


class ResidencyReply(TypedDict):
    """How long blocks stay, since when they were idle when they went, and how soon they were used
    again."""

    block_lifetime_s: Quantiles
    idle_before_evict_s: Quantiles
    reuse_gap_s: Quantiles


class QueueRow(TypedDict):
    """Sequences of one tenant in the batch and in the queue.

    `weight`: its share of the compute when that is short; null where no file of tenants says so.
    """

    tenant: str
    weight: float | None
    running: int
    waiting: int


class CacheStatsReply(TypedDict):
    """What the cache holds and what it was good for."""

    object: Literal["cache.stats"]
    model: str
    scope: Literal["server", "tenant"]
    tenant: str | None
    enabled: bool
    deterministic: bool
    decoder: Literal["native", "generic"]
    block_size: int
    blocks: Blocks
    tokens: CacheTokens
    events: CacheCounts
    nodes: int | None
    identities: int | None
    hit_rate: float | None
    requests_running: int | None
    requests_waiting: int | None
    queue: list[QueueRow]
    window: WindowReply | None
    waste: WasteReply | None
    residency: ResidencyReply | None
