"""Decode steps as graphs: what a step of single tokens launches is recorded once and then replayed.

Knows batches, buffers and when a recording serves a step; nothing of CUDA (``cuda_graphs``) or of
the model, which is a function of tensors to it.

In a decode step of a large model on a GPU, launching takes longer than computing: thousands of
small kernels, each asked for by Python. A graph replays them all with one call, over the same
memory. So a step's numbers are copied into buffers that stay where they are (``kernels.fixed``),
and its rows are padded to one of a few batch sizes:

    steps of single tokens, at most max_num_seqs    1, 2, 4, 8, ... max_num_seqs rows
    prefill, mixed steps, longer ones, adapters     as they are, kernel by kernel

Recorded when a size is first needed. A recording that fails turns graphs off, and says so once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.fixed import FixedPlan, FixedStep, padded_plan
from radixkv.kernels.plan import AttentionPlan
from radixkv.service.engine.batch import StepBatch

log = logging.getLogger("radixkv.engine")

MOST_GRAPHS = 64
"""Kept at a time, a few MB each; the one that was used longest ago goes first."""

MOST_PARTS = 1 << 14
"""Partial results of a layer (0.3 GB for 32 heads of 128); attention so long outweighs launches."""

Arrays = npt.NDArray[Any]
Compute = Callable[[torch.Tensor, FixedPlan], torch.Tensor]
"""(token ids [rows], plan) -> logits [rows, vocab]; what is recorded."""


class GraphDevice(Protocol):
    """What records a function's work on a device, or stands in for it."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Record ``run``; return its result, which each call of the second overwrites.

        Raises RuntimeError if ``run`` does what cannot be replayed.
        """
        ...

    def sent(self, *sources: Arrays) -> None:
        """Take note that the buffers are filled: nothing of these is needed from now on."""
        ...


class Lister(Protocol):
    """How a backend lists its work for a recording (``triton_attention.DecodeLists``)."""

    def of(self, plan: AttentionPlan) -> Any:
        """List the work of a step."""
        ...

    def room(self, works: Any) -> Any:
        """Say how long the lists are that hold it."""
        ...

    def step(self, room: Any, rows: int, tables: torch.Tensor, block_size: int) -> FixedStep:
        """Make buffers for such steps."""
        ...


@dataclass(slots=True, eq=False)
class _Recording:
    step: FixedStep
    logits: torch.Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """The recorded decode steps of one model over one pool. One thread at a time may use it."""

    def __init__(
        self,
        device: GraphDevice,
        compute: Compute,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        scratch_block: int,
        tables_on: torch.device,
        lister: Lister | None,
    ) -> None:
        """Prepare; nothing is recorded yet.

        scratch_block  a block of the pool that no sequence will ever have
        lister         None for a backend on the host, which derives its work from the plan
        """
        self.off: str | None = None
        self.num_replays = 0
        self._device = device
        self._compute = compute
        self._block_size = block_size
        self._scratch = scratch_block
        self._lister = lister
        self._buckets = buckets(max_num_seqs)
        width = -(-max_model_len // block_size)
        self._tables = torch.full(
            (max_num_seqs, width), scratch_block, dtype=torch.int32, device=tables_on
        )
        self._recordings: OrderedDict[tuple[int, Any], _Recording] = OrderedDict()

    @property
    def num_recordings(self) -> int:
        """How many are kept."""
        return len(self._recordings)

    def forget(self) -> None:
        """Drop all recordings: what they compute with has changed."""
        self._recordings.clear()

    def forward(self, batch: StepBatch) -> torch.Tensor | None:
        """Compute a step if it is one of single tokens; None: compute it kernel by kernel.

        Returns logits [R, vocab], fp32, in memory of their own. The batch's copies are done before.
        """
        n = batch.num_seqs
        if self.off is not None or not 0 < n == batch.num_tokens <= self._buckets[-1]:
            return None
        if any(adapter is not None for adapter in batch.adapters):
            return None  # whose weights come and go, and differ from row to row
        rows = next(size for size in self._buckets if size >= n)
        plan = padded_plan(batch.kv_lens, batch.block_tables, rows, self._scratch, self._block_size)
        if plan.host_block_tables.shape[1] > self._tables.shape[1]:
            return None
        works = room = lists = None
        if self._lister is not None:
            works = self._lister.of(plan)
            room = self._lister.room(works)
            if room.slots > MOST_PARTS:
                return None
            lists = room.fill(works)
        wanted = batch.logit_rows.copy()
        recording = self._recordings.get((rows, room))
        step = self._buffers(rows, room) if recording is None else recording.step
        step.load(batch.token_ids, plan, lists)
        if recording is None:
            recording = self._record(step, (rows, room))
            if recording is None:
                return None
        self._recordings.move_to_end((rows, room))
        self._device.sent(
            *(batch.token_ids, batch.query_lens, batch.kv_lens, batch.block_tables),
            *(plan.slots.numpy(), plan.positions.numpy(), plan.host_block_tables),
            *(plan.host_kv_lens, plan.host_query_lens, step.arena.staging),
            *(lists or {}).values(),
        )
        recording.replay()
        self.num_replays += 1
        return _picked(recording.logits, wanted)

    def _buffers(self, rows: int, room: Any) -> FixedStep:
        if self._lister is None:
            return FixedStep(rows, self._tables, self._block_size, on_host=True)
        return self._lister.step(room, rows, self._tables, self._block_size)

    def _record(self, step: FixedStep, key: tuple[int, Any]) -> _Recording | None:
        try:
            logits, replay = self._device.record(lambda: self._compute(step.token_ids, step.plan))
        except RuntimeError as error:
            self.off = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            log.warning("decode steps run kernel by kernel, not as a graph: %s", self.off)
            self.forget()
            return None
        recording = self._recordings[key] = _Recording(step, logits, replay)
        while len(self._recordings) > MOST_GRAPHS:
            self._recordings.popitem(last=False)
        return recording


def buckets(most: int) -> tuple[int, ...]:
    """Return the batch sizes that steps are padded to: powers of two, and ``most`` itself."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def _picked(logits: torch.Tensor, wanted: npt.NDArray[np.int64]) -> torch.Tensor:
    """Take the wanted rows as float32, out of memory that the next step overwrites."""
    n = len(wanted)
    if bool((wanted == np.arange(n)).all()):
        return logits[:n].to(torch.float32, copy=True)
    return logits[torch.from_numpy(wanted).to(logits.device)].float()
