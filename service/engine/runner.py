"""Runs one step of the model over the KV pool: arrays in, logits out; knows nothing of requests.

Three ways: the compiled decoder where the model has one; a recorded graph for steps of single
tokens, where a device records (``graphs``); transformers' layers for all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.attention import choose_backend
from radixkv.kernels.copy import copy_blocks
from radixkv.kernels.gather import gather_blocks, scatter_blocks
from radixkv.kernels.layout import KVPool
from radixkv.kernels.plan import AttentionPlan
from radixkv.service.engine.adapted_layers import AdaptedLayers
from radixkv.service.engine.adapters import native_runs, runs_of
from radixkv.service.engine.attention import PagedStep
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.graphs import DecodeGraphs, GraphDevice

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel


class ModelRunner:
    """A model and the pool that holds its keys and values.

    One thread at a time may use it. The blocks' owner decides what is written where: the runner
    writes exactly the slots of the new tokens and the targets of the copies.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        *,
        backend: str = "auto",
        kv_dtype: torch.dtype | None = None,
        graphs: GraphDevice | None = None,
        max_num_seqs: int = 64,
    ) -> None:
        """Allocate the pool.

        kv_dtype  what the pool stores; None: what the model computes
        graphs    records steps of up to ``max_num_seqs`` single tokens. The pool then has one block
                  more than ``num_blocks``, for rows that nobody has
        """
        self.loaded = loaded
        self.block_size = block_size
        self.backend = backend
        self._layers = AdaptedLayers(loaded.model)
        self.pool = KVPool.allocate(
            loaded.num_layers,
            num_blocks + (graphs is not None),
            block_size,
            loaded.num_kv_heads,
            loaded.head_dim,
            kv_dtype or loaded.kv_dtype,
            loaded.device,
        )
        self._recorded_of = loaded.fingerprints
        self.graphs = None
        if graphs is not None:
            self.graphs = self._record_with(graphs, num_blocks, max_num_seqs)

    @staticmethod
    def bytes_per_block(
        loaded: LoadedModel, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> int:
        """Bytes of device memory that one block takes, over all layers."""
        dtype = kv_dtype or loaded.kv_dtype
        return KVPool.bytes_per_block(
            loaded.num_layers, block_size, loaded.num_kv_heads, loaded.head_dim, dtype
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Do the copies, then compute the new tokens; return logits [R, vocab], fp32, on device.

        Logits exist only for ``batch.logit_rows``. Asynchronous on a GPU.
        """
        if batch.copies:
            copy_blocks(self.pool, *zip(*batch.copies, strict=True))
        if self.graphs is not None and not batch.adapters:
            if self._recorded_of is not self.loaded.fingerprints:  # other weights compute
                self._recorded_of = self.loaded.fingerprints
                self.graphs.forget()
            logits = self.graphs.forward(batch)
            if logits is not None:
                return logits
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
            return self._compute(tokens, plan, self._rows_to_keep(batch)).float()

    def _compute(
        self, tokens: torch.Tensor, plan: AttentionPlan, rows: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Run transformers' layers; logits [R, vocab] of ``rows`` (0: of all), in their dtype."""
        output: Any = self.loaded.model(
            input_ids=tokens.unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            radixkv=PagedStep.of(self.pool, plan, self.backend),
        )
        logits: torch.Tensor = output.logits
        return logits[0]

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

    def _record_with(
        self, device: GraphDevice, scratch_block: int, max_num_seqs: int
    ) -> DecodeGraphs | None:
        loaded, pool, lister = self.loaded, self.pool, None
        backend = choose_backend(loaded.device) if self.backend == "auto" else self.backend
        if backend == "triton":
            from radixkv.kernels.triton_attention import DecodeLists, Heads
            from radixkv.kernels.triton_config import shared_bytes

            q_heads = getattr(loaded.model.config, "num_attention_heads", 0)
            if not q_heads or q_heads % loaded.num_kv_heads:
                return None
            heads = Heads(
                q_heads=q_heads,
                kv_heads=loaded.num_kv_heads,
                head_dim=loaded.head_dim,
                dtype=loaded.kv_dtype,
                pool_bytes=pool.dtype.itemsize,
                quantised=pool.scales is not None,
                shared_bytes=shared_bytes(loaded.device),
            )
            lister = DecodeLists(heads, loaded.windows)
        return DecodeGraphs(
            device,
            self._compute,
            max_num_seqs=max_num_seqs,
            max_model_len=min(loaded.max_model_len, scratch_block * self.block_size),
            block_size=self.block_size,
            scratch_block=scratch_block,
            tables_on=loaded.device,
            lister=lister,
        )
