"""Paged attention on GPUs: says which Triton kernel attends which queries to which keys in a step.

Imported only where triton is installed. Shared runs of keys go to ``triton_tree``, single new
tokens to ``triton_decode``, the rest to ``triton_prefill``; ``triton_merge`` combines the parts.
Reference: ``reference.paged_attention_reference``.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.features import Features
from radixkv.kernels.fixed import FixedPlan, FixedStep
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.tree import CostModel, SharedRuns, shared_runs
from radixkv.kernels.triton_call import Call, Partials
from radixkv.kernels.triton_config import (
    Family,
    Launch,
    choose_launch,
    run_tokens,
    shared_bytes,
    split_tokens,
)
from radixkv.kernels.triton_decode import decode
from radixkv.kernels.triton_fixed import Room
from radixkv.kernels.triton_merge import merge
from radixkv.kernels.triton_prefill import prefill
from radixkv.kernels.triton_tree import attend_runs
from radixkv.kernels.triton_work import Sizes, Work, list_work

STEP_BYTES = 8 << 20
"""What a GPU reads in the time of the two launches that sharing adds, about 2 us each."""

RUN_BYTES = 64 << 10
"""What a GPU reads in the time in which a run's programs start and end."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What sizes and prices follow from: a model's heads, its pool's type, the device's memory."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the queries
    pool_bytes: int  # of a number in the pool
    quantised: bool
    shared_bytes: int

    @classmethod
    def of(cls, call: Call) -> "Heads":
        q = call.q
        return cls(
            q.shape[1],
            call.num_kv_heads,
            q.shape[2],
            q.dtype,
            call.k_pool.element_size(),
            call.k_scales is not None,
            shared_bytes(q.device),
        )

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def launch(self, family: Family) -> Launch:
        return choose_launch(
            family, self.dtype, self.head_dim, self.group, self.quantised, self.shared_bytes
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """How keys are cut among programs, and where sharing them pays.

    split  tokens of a program of a decoding sequence; a row's low bits depend on it
    run    tokens of a program of a shared run, at least; a multiple of split
    cost   in bytes of device memory read, or whatever is as dear
    """

    split: int
    run: int
    cost: CostModel

    @classmethod
    def of(cls, heads: Heads) -> "Tuning":
        """Weigh the keys that sharing need not read against the parts it writes and reads.

        A row's part is 4 bytes a head and dimension, twice: with 32 query heads over 8 key heads
        as much as 8 tokens of bfloat16 keys and values.
        """
        vector = heads.head_dim * heads.pool_bytes + 4 * heads.quantised
        cost = CostModel(
            token=2.0 * heads.kv_heads * vector,
            run=float(RUN_BYTES),
            row=2.0 * 4 * heads.q_heads * (heads.head_dim + 2),
            step=float(STEP_BYTES),
        )
        return cls(split_tokens(heads.group), run_tokens(heads.group), cost)

    def runs(self, plan: AttentionPlan, window: int | None) -> SharedRuns | None:
        """Say what is read once for whom; a short window leaves too little to look for."""
        if window is not None and window < 4 * self.split:
            return None
        return shared_runs(plan, self.split, self.cost)


def paged_attention_triton(
    q: torch.Tensor,
    k_pool_layer: torch.Tensor,
    v_pool_layer: torch.Tensor,
    plan: AttentionPlan,
    features: Features,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    *,
    tuning: Tuning | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as ``paged_attention`` says; at most four launches, without synchronisation.

    q and the pool have one dtype: float32, bfloat16 or float16; or the pool is int8 or
    float8_e4m3fn, with k_scales and v_scales float32 [num_blocks, block_size, num_kv_heads].
    Softmax and sums in float32.
    """
    call = Call.of(q, k_pool_layer, v_pool_layer, plan, features, k_scales, v_scales)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads = Heads.of(call)
    if isinstance(plan, FixedPlan):
        step, tuning = _fixed(plan, heads, features)
    else:
        tuning = tuning or Tuning.of(heads)
        step = _step(call, tuning)
    partials = Partials.allocate(step.num_slots, heads.q_heads, heads.head_dim, q.device)
    if len(step.runs):
        attend_runs(call, step.runs, step.run_queries, partials, heads.launch("tree"))
    if len(step.decode):
        decode(call, step.decode, partials, out, heads.launch("decode"), tuning.split)
    if len(step.prefill):
        prefill(call, step.prefill, partials, out, heads.launch("prefill"))
    if len(step.merge):
        merge(step.merge, partials, features, out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The lists of a step on the device, as ``Work`` has them."""

    runs: torch.Tensor
    run_queries: torch.Tensor
    decode: torch.Tensor
    prefill: torch.Tensor
    merge: torch.Tensor
    num_slots: int


def _step(call: Call, tuning: Tuning) -> _Step:
    """List the step's work at the first layer of a kind; the others find it in the plan."""
    plan, heads, window = call.plan, Heads.of(call), call.features.sliding_window

    def make() -> _Step:
        shared = tuning.runs(plan, window)
        work = list_work(plan, window, shared, _sizes(heads, tuning))
        lists = (work.runs, work.run_queries, work.decode, work.prefill, work.merge)
        # One transfer for all: each is a short list, and a transfer costs more than its bytes. Each
        # begins at a multiple of 16 bytes, or the kernels would be compiled once more for it.
        padded = [np.pad(x.ravel(), (0, -x.size % 4)) for x in lists]
        device = torch.from_numpy(np.concatenate(padded)).to(plan.device, non_blocking=True)
        ends = np.cumsum([0, *map(len, padded)]).tolist()
        runs, run_queries, decode, prefill, merge = (
            device[end : end + x.size].view(x.shape) for end, x in zip(ends, lists, strict=False)
        )
        return _Step(runs, run_queries, decode, prefill, merge, work.num_slots)

    return plan.once(("triton step", heads, window, tuning), make)


def _sizes(heads: Heads, tuning: Tuning) -> Sizes:
    return Sizes(
        split=tuning.split,
        prefill_queries=heads.launch("prefill").block_m // heads.group,
        run=tuning.run,
        run_queries=heads.launch("tree").block_m // heads.group,
        num_kv_heads=heads.kv_heads,
    )


def _fixed(plan: FixedPlan, heads: Heads, features: Features) -> tuple[_Step, Tuning]:
    """Find the lists that ``DecodeLists`` has laid down for a step of single tokens."""
    work, window = plan.work, features.sliding_window
    expect(("decode", window) in work, "plan.work", f"lists for a window of {window}", list(work))
    listed_for, tuning = plan.listed_for
    expect(heads == listed_for, "q and the pool", f"what was listed for, {listed_for}", heads)
    decode = work["decode", window]
    step = _Step(
        work["runs", window],
        work["run_queries", window],
        decode,
        decode[:0],
        work["merge", window],
        plan.slots_of_partials,
    )
    return step, tuning


class DecodeLists:
    """Lists the work of decode steps for a captured graph: by window, at sizes known beforehand.

    ``paged_attention_triton`` launches exactly what is in them. ``windows`` are those of all the
    layers, None for one without.
    """

    def __init__(
        self, heads: Heads, windows: Iterable[int | None], *, tuning: Tuning | None = None
    ) -> None:
        self._heads, self._tuning = heads, tuning or Tuning.of(heads)
        self._sizes = _sizes(heads, self._tuning)
        self._windows = tuple(dict.fromkeys(windows))

    def of(self, plan: AttentionPlan) -> dict[int | None, Work]:
        """List the work of a step of one token a sequence; every row is merged."""
        return {
            window: list_work(
                plan, window, self._tuning.runs(plan, window), self._sizes, merge_all=True
            )
            for window in self._windows
        }

    def room(self, works: Mapping[int | None, Work]) -> Room:
        """Say how long the lists are that hold the work, and the programs of a launch."""
        return Room.of(works)

    def step(self, room: Room, rows: int, tables: torch.Tensor, block_size: int) -> FixedStep:
        """Make the buffers of steps of ``rows`` sequences that fit into ``room``."""
        shapes: dict[Hashable, tuple[int, ...]] = room.shapes(rows, self._windows)
        return FixedStep(
            rows,
            tables,
            block_size,
            lists=shapes,
            listed_for=(self._heads, self._tuning),
            slots_of_partials=room.slots,
        )
