"""What of a prompt is to stay resident after its request, and what of that was granted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the first ``num_tokens`` of a prompt resident, until they were not used for ``ttl_s``.

    ``ttl_s`` None: until they are unpinned. A ``name`` is its owner's own; whatever had it before
    is let go.
    """

    num_tokens: int
    ttl_s: float | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a Keep: of what it wanted, the first ``granted_tokens`` are pinned."""

    keep: Keep
    granted_tokens: int
    pin_id: str | None
    """None where nothing was granted."""
