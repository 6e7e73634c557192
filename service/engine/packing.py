"""Packs a step's works into one batch of numbers, without padding of tokens.

On the path of every step, and O(tokens + blocks of the tables): one pass, one array a field.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixkv.blocks import BlockCopy
from radixkv.service.engine.adapters import by_adapter
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.work import Work


class Packed(NamedTuple):
    """A batch, and where in it to find what."""

    works: list[Work]
    """In the order of the batch: what is under one adapter is together."""
    batch: StepBatch
    num_rows: list[int]
    """Rows of logits that each work is given, in the same order."""


def pack(works: list[Work]) -> Packed:
    """Pack the works, one after the other."""
    adapters = [work.seq.request.adapter for work in works]
    if any(adapters):
        works = by_adapter(works, lambda work: work.seq.request.adapter)
        adapters = [work.seq.request.adapter for work in works]
    else:
        adapters = []
    token_ids: list[int] = []
    query_lens: list[int] = []
    kv_lens: list[int] = []
    logit_rows: list[int] = []
    num_rows: list[int] = []
    copies: list[BlockCopy] = []
    tables = []
    offset = 0
    for work in works:
        seq, table, num_tokens = work.seq, work.table, work.num_tokens
        start = table.num_tokens
        stop = start + num_tokens
        if num_tokens == 1:
            token_ids.append(seq.ids[start])
        else:
            token_ids += seq.ids[start:stop]
        query_lens.append(num_tokens)
        kv_lens.append(stop)
        tables.append(table.blocks)
        copies += work.copies
        offset += num_tokens
        prompt_logprobs = seq.request.prompt_logprobs
        if prompt_logprobs is not None and not prompt_logprobs.complete:
            logit_rows += range(offset - num_tokens, offset)
            num_rows.append(num_tokens)
        elif work.reaches_end:
            logit_rows.append(offset - 1)
            num_rows.append(1)
        else:
            num_rows.append(0)
    block_tables = np.zeros((len(works), max(map(len, tables))), dtype=np.int32)
    for i, blocks in enumerate(tables):
        block_tables[i, : len(blocks)] = blocks
    batch = StepBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        query_lens=np.array(query_lens, dtype=np.int32),
        kv_lens=np.array(kv_lens, dtype=np.int32),
        block_tables=block_tables,
        copies=copies,
        logit_rows=np.array(logit_rows, dtype=np.int64),
        adapters=adapters,
    )
    return Packed(works, batch, num_rows)
