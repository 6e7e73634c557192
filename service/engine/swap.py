"""Keeps the KV of preempted sequences in host memory, where copying is cheaper than computing.

Knows sequences and their tables, block ids, bytes and seconds; nothing of tensors or turns. At a
preemption the blocks that nobody else holds are copied out, if there is room for them and if what
copies took so far says that there and back takes less time than computing them again; at the
resumption whatever is still resident is used as it is, and only what is not is copied in:

    0 .......... first_block ............... num_tokens
    | resident or computed | copied back in     | computed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from radixkv.service.engine.counters import Counters
from radixkv.service.engine.rates import PrefillRate, Rate
from radixkv.service.engine.request import Saved, Sequence


class BlockMover(Protocol):
    """What copies whole blocks between the device and the host."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's record."""
        ...

    def save(self, blocks: npt.NDArray[np.int32]) -> Any:
        """Return one record a block, in host memory; can be sliced."""
        ...

    def restore(self, blocks: npt.NDArray[np.int32], records: Any) -> None:
        """Write records of ``save`` to ``blocks``, before anything that is computed later."""
        ...


class HostPool:
    """A budget of host memory, and how much of it is taken. ``0 <= used_bytes <= capacity``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Take room; False, and nothing taken, if there is not enough."""
        if self.used_bytes + num_bytes > self.capacity_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Give room back."""
        assert num_bytes <= self.used_bytes, "more given back than was taken"
        self.used_bytes -= num_bytes


class Swapper:
    """Saves, restores and forgets; what it has saved of a sequence hangs on the sequence."""

    def __init__(
        self,
        mover: BlockMover,
        capacity_bytes: int,
        block_size: int,
        counters: Counters,
        clock: Callable[[], float],
        computing: PrefillRate,
    ) -> None:
        """``clock`` tells seconds; ``computing``: how long prompt tokens take, kept by others."""
        self.pool = HostPool(capacity_bytes)
        self.copying = Rate()
        """Bytes, either way."""
        self._computing = computing
        self._mover = mover
        self._block_size = block_size
        self._counters = counters
        self._clock = clock

    def save(
        self, seq: Sequence, blocks: npt.NDArray[np.int32], num_shared: int, num_tokens: int
    ) -> bool:
        """Keep what ``blocks`` hold of ``seq`` from block ``num_shared`` to token ``num_tokens``.

        Called between the release of the blocks and the next use of any. Returns whether what the
        sequence has computed is kept; if not, it will be computed again.
        """
        if seq.saved is not None:
            return True  # it had not come as far as to need it
        stop = -(-num_tokens // self._block_size)
        tokens = num_tokens - num_shared * self._block_size
        num_bytes = (stop - num_shared) * self._mover.block_bytes
        if tokens <= 0 or not self._is_cheaper(tokens, num_bytes) or not self.pool.take(num_bytes):
            return False
        began = self._clock()
        records = self._mover.save(blocks[num_shared:stop])
        self.copying.note(num_bytes, self._clock() - began)
        seq.saved = Saved(num_shared, num_tokens, records, num_bytes)
        self._counters.swapped_out_tokens += tokens
        self._counters.swapped_out_bytes += num_bytes
        return True

    def restore(self, seq: Sequence) -> int:
        """Copy in what was saved and follows the computed tokens of ``seq``; forget the rest.

        Returns the tokens that may be computed next: what is saved begins behind them, or nothing
        is saved. OutOfBlocks leaves all as it was.
        """
        saved, table, size = seq.saved, seq.table, self._block_size
        assert table is not None
        at = table.num_tokens
        if saved is not None and at < saved.first_block * size:
            return saved.first_block * size - at
        if saved is not None:
            if at < saved.num_tokens and at % size == 0:
                table.reserve(saved.num_tokens - at)
                first, stop = at // size, -(-saved.num_tokens // size)
                began = self._clock()
                skipped = first - saved.first_block
                self._mover.restore(table.blocks[first:stop], saved.records[skipped:])
                num_bytes = (stop - first) * self._mover.block_bytes
                self.copying.note(num_bytes, self._clock() - began)
                table.commit(saved.num_tokens - at)
                seq.publish()
                self._counters.swapped_in_tokens += saved.num_tokens - at
                self._counters.observer.restored(seq.request, saved.num_tokens - at)
                self._counters.swapped_in_bytes += num_bytes
            self.forget(seq)
        return seq.remaining

    def forget(self, seq: Sequence) -> None:
        """Give up what is saved of ``seq``; harmless if nothing is."""
        if seq.saved is not None:
            self.pool.give(seq.saved.num_bytes)
            seq.saved = None

    def _is_cheaper(self, tokens: int, num_bytes: int) -> bool:
        """Whether copying out and in takes less time than computing; yes until both are known."""
        copying, computing = self.copying.seconds(2 * num_bytes), self._computing.seconds(tokens)
        return copying is None or computing is None or copying < computing
