"""Applies adapters inside transformers' own linear layers, to the rows of a step that are theirs.

Knows modules, rows and factors; nothing of sequences. A layer is watched from the first adapter on
that changes it, so a model without adapters runs exactly as it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from radixkv.service.engine.adapters import AdapterRun


class AdaptedLayers:
    """The linear layers of one model; for one thread at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watched: set[str] = set()
        self._runs: Sequence[AdapterRun] = ()

    @contextmanager
    def under(self, runs: Sequence[AdapterRun]) -> Iterator[None]:
        """Apply the adapters of ``runs`` to their rows of the forward pass within the block."""
        for run in runs:
            if run.adapter.native is not None:
                raise RuntimeError("this adapter was fitted to the compiled decoder, not to layers")
            for path in run.adapter.factors.keys() - self._watched:
                self._watch(path)
        self._runs = runs
        try:
            yield
        finally:
            self._runs = ()

    def _watch(self, path: str) -> None:
        def add(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            # In place: a fresh product, or this layer's own columns of a merged one.
            for adapter, start, stop in self._runs:
                factors = adapter.factors.get(path)
                if factors is not None:
                    a, b = factors
                    low = nn.functional.linear(args[0][0, start:stop], a)
                    output[0, start:stop] += nn.functional.linear(low, b)

        self._model.get_submodule(path).register_forward_hook(add)
        self._watched.add(path)
