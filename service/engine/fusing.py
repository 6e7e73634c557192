"""Makes a loaded model call fewer, larger operators: merged projections and norms of one call.

Knows layers and their names; nothing of attention. Decoding reads every weight for one token, and
many small matrix products read memory worse than a few large ones: a decode step of SmolLM2 on two
cores spends an eighth less time in four products a layer than in seven.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from radixkv.kernels.linear import linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that transformers' decoders always call with one and the same tensor."""


NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that are exactly torch's rms_norm: weight * x / sqrt(mean(x^2) + epsilon)."""


class OneCallRMSNorm(nn.Module):
    """What the norms above compute in six operators, in one. They become this class in place."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )


def join_norms(model: nn.Module) -> int:
    """Let the float32 norms of ``model`` be computed by one operator each; returns how many.

    In bfloat16 they round between their steps, and stay as they are.
    """
    found = 0
    for module in model.modules():
        if type(module).__name__ in NORMS and module.weight.dtype == torch.float32:
            module.__class__ = OneCallRMSNorm
            found += 1
    return found


class MergedProjection:
    """One weight for several projections, and its product with the input they last were given."""

    __slots__ = ("_bias", "_input", "_output", "_weight", "_wanted", "num_parts")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_parts: int) -> None:
        self._weight, self._bias = weight, bias
        self.num_parts = num_parts
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._wanted = 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` by the whole weight, once for all parts that ask with the same tensor."""
        if x is not self._input or self._output is None:
            self._input = x
            self._output = linear(x, self._weight, self._bias)
            self._wanted = self.num_parts
        output = self._output
        self._wanted -= 1
        if not self._wanted:  # every part has it: do not keep it alive
            self._input = self._output = None
        return output


class ProjectionPart(nn.Linear):
    """A linear layer whose weight is a slice of a merged one; it keeps its name in state dicts."""

    def __init__(self, merged: MergedProjection, own: nn.Linear, start: int, whole: Any) -> None:
        nn.Module.__init__(self)
        stop = start + own.out_features
        self.in_features, self.out_features = own.in_features, own.out_features
        weight, bias = whole
        self.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        part = None if bias is None else nn.Parameter(bias[start:stop], requires_grad=False)
        self.register_parameter("bias", part)
        self._merged = merged
        self._start, self._stop = start, stop

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Take this part's columns of the merged product; a view."""
        return self._merged.product(input)[..., self._start : self._stop]


class FewRowsLinear(nn.Linear):
    """A linear layer that asks our kernels first. Plain ones become this class in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        return linear(input, self.weight, self.bias)


def use_kernels(model: nn.Module) -> int:
    """Let the plain linear layers of ``model`` use our kernels; returns how many do."""
    found = 0
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
            found += 1
    return found


def merge_projections(model: nn.Module) -> int:
    """Merge the groups of plain linear layers found in ``model``, in place; returns how many.

    Weights move into one tensor per group and the old layers' become views of it, so nothing is
    held twice and an update of a weight by name reaches both. Results agree to rounding.
    """
    merged = 0
    for parent in list(model.modules()):
        for names in GROUPS:
            layers = [getattr(parent, name, None) for name in names]
            if not _mergeable(layers):
                continue
            with torch.no_grad():
                weight = torch.cat([layer.weight for layer in layers])
                biases: list[torch.Tensor] = [p.bias for p in layers if p.bias is not None]
                bias = torch.cat(biases) if biases else None
            shared = MergedProjection(weight, bias, len(layers))
            start = 0
            for name, layer in zip(names, layers, strict=True):
                setattr(parent, name, ProjectionPart(shared, layer, start, (weight, bias)))
                start += layer.out_features
            merged += 1
    return merged


def _mergeable(layers: list[Any]) -> TypeGuard[list[nn.Linear]]:
    first = layers[0]
    return all(
        type(layer) is nn.Linear  # a subclass (quantised, adapted) has ways of its own
        and layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        for layer in layers
    )
