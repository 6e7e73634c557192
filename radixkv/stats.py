"""What a cache has done and what it holds, as numbers.

Knows names and units; counts nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Counters never fall; rates are made from the difference of two snapshots."""

    # Counters, since the cache was made.
    queries: int
    """Acquires of new sequences."""
    queried_tokens: int
    """Tokens of those sequences: the denominator of the hit rate."""
    hit_tokens: int
    """Tokens of them whose KV was resident and reused, partial blocks included."""
    partial_hit_tokens: int
    """The part of ``hit_tokens`` that was reused by copying the beginning of a block."""
    resumed_queried_tokens: int
    """Tokens of sequences that came back after a preemption; in none of the above."""
    resumed_hit_tokens: int
    """The part of those that was still resident."""
    published_blocks: int
    """Blocks that entered the tree."""
    deduplicated_blocks: int
    """Blocks let go at publishing, because blocks of equal tokens were resident."""
    evicted_blocks: int
    """Blocks given up to make room."""
    cow_copies: int
    """Blocks copied because others held them when they were to be written."""
    resets: int

    # Gauges, now. num_blocks == free_blocks + referenced_blocks
    #                        == free_blocks + evictable_blocks + used_blocks.
    num_blocks: int
    free_blocks: int
    referenced_blocks: int
    """Blocks with a reference, be it a sequence's or the tree's."""
    cached_blocks: int
    """Blocks in the tree, held by a sequence or not."""
    cached_tokens: int
    """Tokens whose KV those hold: what is missing to their size is unused room in tails."""
    evictable_blocks: int
    """Blocks that only the tree holds."""
    nodes: int
    """Nodes of all trees, roots left out."""
    identities: int
    """Roots: one for each identity with a block resident, and one for each public prefix behind
    which it has any."""

    @property
    def used_blocks(self) -> int:
        """Blocks that a lease or a table holds now."""
        return self.num_blocks - self.free_blocks - self.evictable_blocks
