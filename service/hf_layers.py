"""Layers of a transformers cache that begin with a prefix, and keep what they would forget.

Knows tensors and windows; nothing of tokens or blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Let a fresh layer of a cache begin with the KV of ``length`` tokens.

    keys, values  [batch, heads, tokens, dim]; at a window the last ``window - 1`` tokens suffice
    """
    if getattr(layer, "is_sliding", False):
        keep = layer.sliding_window - 1
        keys, values = keys[:, :, -keep:], values[:, :, -keep:]
        layer.lazy_initialization(keys, values)
        layer.cumulative_length = length
    else:
        layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


class KeepingWindow(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer with a window that also keeps what leaves the window, while ``kept`` is a list."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.kept: list[KV] | None = []

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kept is not None:
            self.kept.append((key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)

    def forget(self, num_tokens: int) -> None:
        """Drop the last ``num_tokens`` kept."""
        while self.kept and num_tokens > 0:
            keys, values = self.kept.pop()
            left = keys.shape[2] - num_tokens
            num_tokens -= keys.shape[2]
            if left > 0:
                self.kept.append((keys[:, :, :left], values[:, :, :left]))
