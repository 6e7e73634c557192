"""What a step hands to the model, in numbers: seen by the runner of a core on a fake model."""

from __future__ import annotations

import numpy as np

from radixkv.service.engine.packing import pack
from tests.fake_model import Rig


def test_prompts_in_chunks_and_single_tokens_are_packed_one_after_another() -> None:
    rig = Rig(block_size=4, max_batch_tokens=8)
    rig.submit([11, 12, 13, 14, 15], 4)
    rig.turn()
    rig.submit([21 + i for i in range(10)], 2)
    rig.turn()
    first, second = rig.core.scheduler.running
    batch = rig.runner.batches[-1]
    assert batch.token_ids.tolist() == [first.ids[5], 21, 22, 23, 24, 25, 26, 27]
    assert batch.query_lens.tolist() == [1, 7] and batch.kv_lens.tolist() == [6, 7]
    assert batch.logit_rows.tolist() == [0], "the second prompt is not at its end"
    assert first.table is not None and second.table is not None
    for row, table in zip(batch.block_tables, (first.table, second.table), strict=True):
        blocks = table.blocks[: -(-7 // 4)]
        assert row[: len(blocks)].tolist() == blocks.tolist()
    assert not batch.adapters
    assert [a.dtype for a in (batch.token_ids, batch.query_lens, batch.block_tables)] == [
        np.int64,
        np.int32,
        np.int32,
    ]


def test_each_work_is_given_its_rows_of_logits() -> None:
    rig = Rig(block_size=4, max_batch_tokens=8)
    rig.submit([11, 12, 13], 4)
    rig.submit([21 + i for i in range(20)], 2)
    rig.turn()
    works = rig.core.scheduler.schedule()
    packed = pack(works)
    assert packed.works is works, "where there is no adapter the order stays"
    assert packed.num_rows == [1, 0] and [work.reaches_end for work in works] == [True, False]
    assert packed.batch.num_tokens == sum(work.num_tokens for work in works) == 8
