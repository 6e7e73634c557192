"""What a prefix cache of transformers has done and holds, as numbers; counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """What a TransformersPrefixCache has done and holds. Counters never fall."""

    sequences: int
    """Rows opened and suffixes scored."""
    prompt_tokens: int
    """Tokens of those: what plain calls would have computed before the first answer."""
    cached_tokens: int
    """The part of them that was taken from the cache, or computed once for several."""
    computed_tokens: int
    """Tokens that went through the model in handles and scores, those of answers too."""
    stored_tokens: int
    """Tokens whose KV was stored."""
    evicted_blocks: int
    num_blocks: int
    cached_blocks: int
    memory_bytes: int
    """Bytes of the pool, in use or not."""
