"""The keys and values of all cached tokens, as plain tensors; knows slots and layers, not owners.

    keys[layer]    [num_blocks * block_size, num_heads, key_dim]
    values[layer]  [num_blocks * block_size, num_heads, value_dim]

each of its layer's own shape, type and device. A *slot* is ``block * block_size + offset``. What is
moved is moved once per layer, however many tokens and rows it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixkv.blocks import BlockCopy
from radixkv.service.hf_facts import LayerFacts

Slots = npt.NDArray[np.int64]


class LayerPool:
    """One pair of tensors per layer; a layer that keeps nothing has None."""

    def __init__(
        self, layers: Sequence[LayerFacts | None], num_blocks: int, block_size: int
    ) -> None:
        """Allocate it, zeroed: what is read of a slot that nobody wrote is finite."""
        self.layers = tuple(layers)
        self.block_size = block_size
        num_slots = num_blocks * block_size
        self.keys = [self._zeros(layer, num_slots, "key_dim") for layer in layers]
        self.values = [self._zeros(layer, num_slots, "value_dim") for layer in layers]

    @staticmethod
    def _zeros(layer: LayerFacts | None, num_slots: int, dim: str) -> torch.Tensor | None:
        if layer is None:
            return None
        shape = (num_slots, layer.num_heads, getattr(layer, dim))
        with torch.inference_mode(False):  # or none but inference mode could write to it
            return torch.zeros(shape, dtype=layer.dtype, device=layer.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (*self.keys, *self.values) if x is not None)

    def slots(self, blocks: npt.NDArray[np.int32], positions: Slots) -> Slots:
        """Return the slots of a sequence's positions, from its blocks in order."""
        size = self.block_size
        return blocks.astype(np.int64)[positions // size] * size + positions % size

    def read(self, slots: Slots) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Copy out the KV at ``slots`` [rows, tokens]: by layer keys and values, [rows, heads,
        tokens, dim]. Of a layer with a window only what the next token can see of it.
        """
        found: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        at: dict[tuple[torch.device, int | None], torch.Tensor] = {}
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            if layer is None or keys is None or values is None:
                found.append(None)
                continue
            wanted = slots if layer.window is None else slots[:, 1 - layer.window :]
            where = (layer.device, layer.window)
            if where not in at:
                at[where] = torch.from_numpy(wanted.reshape(-1).copy()).to(layer.device)
            rows, tokens = wanted.shape
            parts = [
                pool.index_select(0, at[where]).view(rows, tokens, layer.num_heads, -1)
                for pool in (keys, values)
            ]
            found.append((parts[0].transpose(1, 2), parts[1].transpose(1, 2)))
        return found

    def write(
        self, slots: Slots, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    ) -> None:
        """Write the KV of one sequence's tokens, by layer [heads, tokens, dim], to ``slots``."""
        at: dict[torch.device, torch.Tensor] = {}
        for keys, values, part in zip(self.keys, self.values, parts, strict=True):
            if keys is None or values is None or part is None:
                continue
            if keys.device not in at:
                at[keys.device] = torch.from_numpy(slots).to(keys.device)
            for pool, new in zip((keys, values), part, strict=True):
                pool.index_copy_(0, at[keys.device], new.detach().transpose(0, 1))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies that a table has promised."""
        size = self.block_size
        for source, target, num_valid in copies:
            for pool in (*self.keys, *self.values):
                if pool is not None:
                    begin = source * size
                    pool[target * size :][:num_valid] = pool[begin : begin + num_valid]
