"""Says whether a tensor's work goes to Triton; knows devices and installed packages only."""

import functools
import importlib.util

import torch


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether ``x`` is on a GPU (CUDA or ROCm) and triton is installed."""
    return x.is_cuda and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
