"""Paged attention on GPUs: says which Triton kernel attends which queries to which keys in a step.

Imported only where triton is installed. Shared runs of keys go to ``triton_tree``, single new
tokens to ``triton_decode``, the rest to ``triton_prefill``; ``triton_merge`` combines the parts.
Reference: ``reference.paged_attention_reference``.
"""

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.kernels.features import Features
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
from radixkv.kernels.triton_merge import merge
from radixkv.kernels.triton_prefill import prefill
from radixkv.kernels.triton_tree import attend_runs
from radixkv.kernels.triton_work import Sizes, Work, list_work

STEP_BYTES = 8 << 20
"""What a GPU reads in the time of the two launches that sharing adds, about 2 us each."""

RUN_BYTES = 64 << 10
"""What a GPU reads in the time in which a run's programs start and end."""


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
    def of(cls, call: Call) -> "Tuning":
        """Weigh the keys that sharing need not read against the parts it writes and reads.

        A row's part is 4 bytes a head and dimension, twice: with 32 query heads over 8 key heads
        as much as 8 tokens of bfloat16 keys and values.
        """
        heads, head_dim = call.q.shape[1:]
        vector = head_dim * call.k_pool.element_size() + 4 * (call.k_scales is not None)
        cost = CostModel(
            token=2.0 * call.num_kv_heads * vector,
            run=float(RUN_BYTES),
            row=2.0 * 4 * heads * (head_dim + 2),
            step=float(STEP_BYTES),
        )
        return cls(split_tokens(call.group), run_tokens(call.group), cost)

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
) -> torch.Tensor:
    """Attend as ``paged_attention`` says; at most four launches, without synchronisation.

    q and the pool have one dtype: float32, bfloat16 or float16; or the pool is int8 or
    float8_e4m3fn, with k_scales and v_scales float32 [num_blocks, block_size, num_kv_heads].
    Softmax and sums in float32.
    """
    call = Call.of(q, k_pool_layer, v_pool_layer, plan, features, k_scales, v_scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = _step(call, tuning or Tuning.of(call))
    num_heads, head_dim = q.shape[1:]
    partials = Partials.allocate(step.work.num_slots, num_heads, head_dim, q.device)
    if len(step.work.runs):
        attend_runs(call, step.runs, step.run_queries, partials, step.tree_launch)
    if len(step.work.decode):
        decode(call, step.decode, partials, out, step.decode_launch, step.split)
    if len(step.work.prefill):
        prefill(call, step.prefill, partials, out, step.prefill_launch)
    if len(step.work.merge):
        merge(step.merge, partials, features, out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The work of a step, on the host and on the device, and the sizes it was listed for."""

    work: Work
    runs: torch.Tensor
    run_queries: torch.Tensor
    decode: torch.Tensor
    prefill: torch.Tensor
    merge: torch.Tensor
    tree_launch: Launch
    decode_launch: Launch
    prefill_launch: Launch
    split: int


def _step(call: Call, tuning: Tuning) -> _Step:
    """List the step's work at the first layer of a kind; the others find it in the plan."""
    plan, group, window = call.plan, call.group, call.features.sliding_window
    head_dim, dtype, room = call.q.shape[2], call.q.dtype, shared_bytes(call.q.device)

    quantised = call.k_scales is not None

    def make() -> _Step:
        def launch(family: Family) -> Launch:
            return choose_launch(family, dtype, head_dim, group, quantised, room)

        tree, single, many = launch("tree"), launch("decode"), launch("prefill")
        sizes = Sizes(
            split=tuning.split,
            prefill_queries=many.block_m // group,
            run=tuning.run,
            run_queries=tree.block_m // group,
            num_kv_heads=call.num_kv_heads,
        )
        work = list_work(plan, window, tuning.runs(plan, window), sizes)
        lists = (work.runs, work.run_queries, work.decode, work.prefill, work.merge)
        # One transfer for all: each is a short list, and a transfer costs more than its bytes. Each
        # begins at a multiple of 16 bytes, or the kernels would be compiled once more for it.
        padded = [np.pad(x.ravel(), (0, -x.size % 4)) for x in lists]
        device = torch.from_numpy(np.concatenate(padded)).to(plan.device, non_blocking=True)
        ends = np.cumsum([0, *map(len, padded)]).tolist()
        runs, run_queries, decode, prefill, merge = (
            device[end : end + x.size].view(x.shape) for end, x in zip(ends, lists, strict=False)
        )
        return _Step(
            work=work,
            runs=runs,
            run_queries=run_queries,
            decode=decode,
            prefill=prefill,
            merge=merge,
            tree_launch=tree,
            decode_launch=single,
            prefill_launch=many,
            split=tuning.split,
        )

    key = ("triton step", group, call.num_kv_heads, head_dim, dtype, quantised, window, tuning)
    return plan.once(key, make)
