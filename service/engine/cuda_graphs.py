"""Records work on a CUDA device as a graph; knows streams and memory pools, nothing of steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


class CudaGraphs:
    """Records on one device. All recordings take their passing memory from one pool.

    So a replay overwrites what an earlier one left there: its result must be read, or copied, in
    the same stream before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run it once, so that kernels are loaded and libraries have their memory; record it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; what they do is not ours to forbid.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()
        replay: Callable[[], None] = graph.replay
        return result, replay

    def sent(self, *sources: Any) -> None:
        """Nothing to do: a graph cannot read what it was not recorded with."""


def cuda_graphs(device: torch.device, setting: str) -> CudaGraphs | None:
    """Return what records on ``device``; None where nothing can, or ``setting`` is off."""
    if setting == "off" or device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return CudaGraphs(device)
