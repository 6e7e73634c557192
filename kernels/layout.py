"""Knows where the keys and values of a block lie in memory; nothing of tokens, tables or owners.

    data  [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]      2 = (keys, values)

Within a layer a *slot* is ``block * block_size + offset``, so a run of consecutive block ids is a
contiguous range of tokens that attention can read in place.
"""

from dataclasses import dataclass

import torch

from radixkv.kernels.checks import expect

LAYOUT_VERSION = 1
"""Changes when the order of a block's bytes does; blocks stored under another are foreign."""

NUMERICS_VERSION = 1
"""Changes when attention gives other low bits for the same input in the default mode."""


@dataclass(frozen=True, slots=True, eq=False)
class KVPool:
    """All keys and values of one model on one device, as ``num_blocks`` interchangeable blocks.

    ``k[layer]`` and ``v[layer]`` are contiguous views [num_blocks, block_size, num_kv_heads,
    head_dim] of ``data``, which owns the memory.
    """

    data: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KVPool":
        """Allocate a zeroed pool (on the CPU the pages are only touched when first written)."""
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        expect(min(shape) > 0, "the pool's shape", "positive in every dimension", shape)
        expect(dtype.is_floating_point, "dtype", "a floating point type", dtype)
        return cls.over(torch.zeros(shape, dtype=dtype, device=device))

    @classmethod
    def over(cls, data: torch.Tensor) -> "KVPool":
        """Wrap an existing tensor of the layout above without copying it."""
        expect(data.dim() == 6 and data.is_contiguous(), "data", "contiguous and 6-d", data)
        expect(data.shape[0] == 2, "data", "[2, layers, blocks, block_size, heads, dim]", data)
        return cls(data=data, k=tuple(data[0]), v=tuple(data[1]))

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_layers(self) -> int:
        return self.data.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[4]

    @property
    def head_dim(self) -> int:
        return self.data.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device
