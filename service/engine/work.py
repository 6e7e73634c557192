"""What a step is put together from: the work of each sequence, and the plan while it is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from radixkv.blocks import BlockCopy
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.shares import Account
from radixkv.service.engine.waiting import WINDOW
from radixkv.table import BlockTable


@dataclass(slots=True, eq=False)
class Work:
    """Compute the next ``num_tokens`` tokens of ``seq``, after doing ``copies`` on the device."""

    seq: Sequence
    table: BlockTable
    num_tokens: int
    copies: list[BlockCopy]
    reaches_end: bool
    """Whether the step leaves nothing to compute, so that a token is to be drawn."""
    ends_public: bool = False
    """It ends where a public prefix does, inside a block: others can share all of it, if told."""


@dataclass(slots=True, eq=False)
class Plan:
    """A step in the making."""

    budget: int
    """Tokens that may still be put to work."""
    works: dict[Sequence, Work] = field(default_factory=dict)
    prompts: dict[Account, list[Sequence]] = field(default_factory=dict)
    """Running sequences that have more than one token to compute, by age."""
    places: int = 0
    """Choices that may start."""
    growth: int = 0
    """Blocks that the running ones will soon take."""
    width: int = WINDOW
    """Look-ups for each tenant that waits."""
    looks: int = WINDOW
    """Look-ups in all."""
    tries: dict[Account, Iterator[tuple[Sequence, int]]] = field(default_factory=dict)
    short: list[Account] = field(default_factory=list)
    """Accounts of which a sequence had the turn, and no room."""
