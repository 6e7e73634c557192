"""Runs one step of the model over the KV pool: arrays in, logits out; knows nothing of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.copy import copy_blocks
from radixkv.kernels.gather import gather_blocks, scatter_blocks
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan
from radixkv.service.engine.adapted_layers import AdaptedLayers
from radixkv.service.engine.adapters import native_runs, runs_of
from radixkv.service.engine.attention import PagedStep
from radixkv.service.engine.batch import StepBatch

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel


class ModelRunner:
    """A model and the pool that holds its keys and values.

    One thread at a time may use it. The blocks' owner decides what is written where: the runner
    writes exactly the slots of the new tokens and the targets of the copies.
    """

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, block_size: int, *, backend: str = "auto"
    ) -> None:
        self.loaded = loaded
        self.block_size = block_size
        self.backend = backend
        self._layers = AdaptedLayers(loaded.model)
        self.pool = KVPool.allocate(
            loaded.num_layers,
            num_blocks,
            block_size,
            loaded.num_kv_heads,
            loaded.head_dim,
            loaded.kv_dtype,
            loaded.device,
        )

    @staticmethod
    def bytes_per_block(loaded: LoadedModel, block_size: int) -> int:
        """Bytes of device memory that one block takes, over all layers."""
        return KVPool.bytes_per_block(
            loaded.num_layers, block_size, loaded.num_kv_heads, loaded.head_dim, loaded.kv_dtype
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Do the copies, then compute the new tokens; return logits [R, vocab], fp32, on device.

        Logits exist only for ``batch.logit_rows``. Asynchronous on a GPU.
        """
        if batch.copies:
            copy_blocks(self.pool, *zip(*batch.copies, strict=True))
        device = self.loaded.device
        plan = AttentionPlan.build(
            batch.query_lens, batch.kv_lens, batch.block_tables, self.block_size, device
        )
        tokens = torch.from_numpy(batch.token_ids).to(device, non_blocking=True)
        runs = runs_of(batch.adapters, batch.query_lens) if batch.adapters else []
        if self.loaded.decoder is not None and self.backend == "auto":
            rows = torch.from_numpy(batch.logit_rows)
            return self.loaded.decoder.forward(tokens, plan, self.pool, rows, native_runs(runs))
        with self._layers.under(runs):
            output: Any = self.loaded.model(
                input_ids=tokens.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._rows_to_keep(batch),
                radixkv=PagedStep(self.pool, plan, self.backend),
            )
        logits: torch.Tensor = output.logits
        return logits[0].float()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's record."""
        return self.pool.block_bytes

    @torch.inference_mode()
    def save(self, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return a record of each block, in host memory: [n, block_bytes] uint8. Waits for it."""
        ids = torch.from_numpy(blocks).to(self.loaded.device)
        return gather_blocks(self.pool, ids).cpu()

    @torch.inference_mode()
    def restore(self, blocks: npt.NDArray[np.int32], records: torch.Tensor) -> None:
        """Write records of ``save`` to ``blocks``; asynchronous on a GPU."""
        device = self.loaded.device
        scatter_blocks(self.pool, torch.from_numpy(blocks).to(device), records.to(device))

    def _rows_to_keep(self, batch: StepBatch) -> torch.Tensor | int:
        rows = batch.logit_rows
        if len(rows) == batch.num_tokens and bool((rows == np.arange(len(rows))).all()):
            return 0  # transformers' word for every row: a step of decodes needs no gather
        return torch.from_numpy(rows).to(self.loaded.device, non_blocking=True)
