"""KV in blocks, taken when they are needed; with reference counts a shared prefix is there once.

Requests start in the order of arrival when their prompt's blocks are free; a step gives each
running one a token, and a block where its last is full. When no block is free the latest yields all
it has and starts again later from its tokens (recomputation: Kwon et al. 2023, section 4.5).
"""

from __future__ import annotations

import numpy as np

from radixkv.simulate.lengths import Workload
from radixkv.simulate.usage import Meter, Usage

WATERMARK = 0.01
"""Of the blocks, what an admission leaves free, so that it does not preempt somebody at once."""


def simulate(
    work: Workload,
    capacity: int,
    block_size: int = 16,
    *,
    shared_tokens: int = 0,
    max_tokens: int = 2048,
) -> Usage:
    """Run ``work`` in ``capacity`` slots of blocks.

    ``shared_tokens`` come before every prompt and are the same: their whole blocks are held once,
    by reference counts. O(steps), each over the running sequences in numpy.
    """
    name = "paged" if not shared_tokens else f"paged, {shared_tokens} shared"
    meter, n = Meter(name, capacity), len(work.prompts)
    shared = shared_tokens // block_size  # blocks
    free = capacity // block_size - shared
    spare = int(WATERMARK * free)
    prompts = work.prompts + shared_tokens
    ends = np.minimum(prompts + work.answers, max(max_tokens, shared_tokens + 1))
    ids = np.empty(0, np.int64)  # of the running requests, oldest first
    tokens = np.empty(0, np.int64)
    held = np.empty(0, np.int64)  # blocks of their own
    again: list[tuple[int, int]] = []  # preempted: (request, tokens), oldest first
    at = 0
    if int(-(-ends.max() // block_size)) - shared > free:
        raise ValueError(f"the longest request never fits {capacity} slots")
    while at < n or len(ids) or again:
        while again or at < n:
            request, have = again[0] if again else (at, int(prompts[at]))
            need = -(-(have + 1) // block_size) - shared
            if need > free - (spare if len(ids) else 0):
                break
            if again:
                again.pop(0)
            else:
                at += 1
            free -= need
            place = int(np.searchsorted(ids, request))
            ids = np.insert(ids, place, request)
            tokens = np.insert(tokens, place, have)
            held = np.insert(held, place, need)
        # One step: a token each, and a block for those whose last is full.
        while True:
            growing = held + shared < -(-(tokens + 1) // block_size)
            if int(growing.sum()) <= free:
                break
            again.insert(0, (int(ids[-1]), int(tokens[-1])))
            free += int(held[-1])
            ids, tokens, held = ids[:-1], tokens[:-1], held[:-1]
            meter.preemptions += 1
        free -= int(growing.sum())
        held = held + growing
        tokens = tokens + 1
        logical = int(tokens.sum())
        own = logical - len(ids) * shared * block_size
        present = own + shared * block_size
        room = (int(held.sum()) + shared) * block_size
        # Of the open slots of a last block, those that will be filled are reserved.
        open_slots = (held + shared) * block_size - tokens
        coming = int(np.minimum(open_slots, ends[ids] - tokens).sum())
        meter.add(
            1.0,
            steady=n // 10 <= at < n,
            tokens=present,
            reserved=coming,
            internal=room - present - coming,
            batch=len(ids),
            logical=logical,
        )
        done = tokens >= ends[ids]
        if done.any():
            free += int(held[done].sum())
            ids, tokens, held = ids[~done], tokens[~done], held[~done]
    return meter.usage()
