"""What a decode step would ask of a device, seen without one: on torch's device without memory.

A recording on a GPU breaks where the host waits for the device, or hands it memory that will be
gone at the replay. Both show without any numbers: ``meta`` refuses to give a value away, and an
operator over tensors of two devices is a transfer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radixkv.kernels.fixed import FixedStep
from radixkv.kernels.layout import KVPool
from radixkv.service.engine.attention import PagedStep, use_paged_attention
from radixkv.service.engine.fusing import join_norms, merge_projections, use_kernels
from tests.tiny_models import ARCHITECTURES, build

OPERATOR = "radixkv.paged_attention"


class Crossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that takes or gives tensors of both devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self.crossed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs or {}, result))
        devices = {x.device.type for x in leaves if isinstance(x, torch.Tensor)}
        self.seen.append(str(func))
        if len(devices) > 1:
            self.crossed.append(str(func))
        return result


def decode_step(model: Any, rows: int = 4) -> Crossings:
    """Run what is recorded, as if everything that a GPU would hold were on a device."""
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    model.to("meta")
    merge_projections(model)
    use_kernels(model)
    join_norms(model)
    data = torch.empty(2, layers, 9, 16, heads, dim, device="meta")
    fixed = FixedStep(rows, torch.empty(rows, 4, dtype=torch.int32, device="meta"), 16)
    step = PagedStep.of(KVPool.over(data), fixed.plan, "triton")
    crossings = Crossings()
    with torch.inference_mode(), crossings:
        logits = model(
            input_ids=fixed.token_ids[None],
            position_ids=fixed.plan.positions[None],
            use_cache=False,
            logits_to_keep=0,
            radixkv=step,
        ).logits
    assert logits.device.type == "meta" and logits.shape[:2] == (1, rows)
    return crossings


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_step_never_waits_for_the_device_nor_reads_the_hosts_memory(arch: str) -> None:
    """Of all that is asked, only the plan's number is the host's."""
    model, _ = build(arch)
    use_paged_attention(model)
    crossings = decode_step(model)
    assert {name.rpartition(".")[0] for name in crossings.crossed} == {OPERATOR}
    assert crossings.seen.count(crossings.crossed[0]) == model.config.num_hidden_layers


def test_a_model_that_asks_for_values_or_for_the_hosts_memory_is_caught() -> None:
    model, _ = build("llama")
    use_paged_attention(model)
    plain = model.model.norm.forward
    model.model.norm.forward = lambda x: plain(x) if float(x.sum()) else x
    with pytest.raises(Exception, match="meta tensors"):
        decode_step(model)
    scale = torch.ones(1)
    model.model.norm.forward = lambda x: plain(x) * scale.to(x.device)
    assert any("to" in name for name in decode_step(model).crossed)
