"""Knows where the keys and values of a block lie in memory; nothing of tokens, tables or owners.

    data    [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]    2 = (keys, values)
    scales  [2, num_layers, num_blocks, block_size, num_kv_heads] float32      int8 and fp8 only

Within a layer a *slot* is ``block * block_size + offset``, so a run of consecutive block ids is a
contiguous range of tokens that attention can read in place.
"""

from dataclasses import dataclass

import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.quant import LIMIT

LAYOUT_VERSION = 1
"""Changes when the order of a block's bytes does; blocks stored under another are foreign."""

NUMERICS_VERSION = 3
"""Changes when attention gives other low bits for the same input in the default mode."""


@dataclass(frozen=True, slots=True, eq=False)
class KVPool:
    """All keys and values of one model on one device, as ``num_blocks`` interchangeable blocks.

    ``k[layer]`` and ``v[layer]`` are contiguous views [num_blocks, block_size, num_kv_heads,
    head_dim] of ``data``, which owns the memory. A pool of int8 or float8_e4m3fn is quantised as
    ``quant`` says: ``scales`` belongs to ``data``, and ``k_scales[layer]``, ``v_scales[layer]`` are
    its views [num_blocks, block_size, num_kv_heads]. Other pools have None there.
    """

    data: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    scales: torch.Tensor | None = None
    k_scales: tuple[torch.Tensor | None, ...] = ()
    v_scales: tuple[torch.Tensor | None, ...] = ()

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
        plain = dtype.is_floating_point and dtype.itemsize > 1
        types = f"a float type of 16 bits or more, {' or '.join(map(str, LIMIT))}"
        expect(plain or dtype in LIMIT, "dtype", types, dtype)
        scales = None if plain else torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        return cls.over(torch.zeros(shape, dtype=dtype, device=device), scales)

    @classmethod
    def over(cls, data: torch.Tensor, scales: torch.Tensor | None = None) -> "KVPool":
        """Wrap existing tensors of the layout above without copying them."""
        expect(data.dim() == 6 and data.is_contiguous(), "data", "contiguous and 6-d", data)
        expect(data.shape[0] == 2, "data", "[2, layers, blocks, block_size, heads, dim]", data)
        k, v = tuple(data[0]), tuple(data[1])
        if data.dtype not in LIMIT:
            expect(scales is None, "scales", f"None for a pool of {data.dtype}", scales)
            none = (None,) * len(k)
            return cls(data, k, v, None, none, none)
        wanted = f"contiguous float32 {tuple(data.shape[:-1])} on {data.device}"
        expect(scales is not None, "scales", wanted, scales)
        assert scales is not None  # for the type checker
        like = scales.shape == data.shape[:-1] and scales.device == data.device
        like = like and scales.dtype == torch.float32 and scales.is_contiguous()
        expect(like, "scales", wanted, scales)
        return cls(data, k, v, scales, tuple(scales[0]), tuple(scales[1]))

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys, values and their scales together."""
        vector = head_dim * dtype.itemsize + (4 if dtype in LIMIT else 0)
        return 2 * num_layers * block_size * num_kv_heads * vector

    @property
    def block_bytes(self) -> int:
        """``bytes_per_block`` of this pool."""
        _, layers, _, size, heads, dim = self.data.shape
        return self.bytes_per_block(layers, size, heads, dim, self.dtype)

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
