"""How far a batch is, and that it cannot go on; plain records."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from radixkv.errors import RadixKVError
from radixkv.service.batch.plan import Totals


class BatchStopped(RadixKVError):
    """The batch cannot go on now; what was answered is on disk."""

    status = 503
    code = "batch_stopped"


@dataclass(slots=True)
class Tally:
    """How far a batch is. Written on the event loop, read by anyone."""

    lines: int = 0
    """All of the file, once it is read."""
    skipped: int = 0
    """Those that a run before had answered."""
    answered: int = 0
    refused: int = 0
    """Those that got an error."""
    planned: Totals = field(default_factory=Totals)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reading: bool = True
    began_s: float = field(default_factory=time.monotonic)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found in the cache."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def finished(self) -> int:
        """Lines that have their result, those of a run before included."""
        return self.skipped + self.answered + self.refused
