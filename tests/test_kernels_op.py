"""Writing and attending as one operator: right by itself, and seen through by torch's compilers."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.layout import KVPool
from radixkv.kernels.op import number_of, write_and_attend
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.write import write_kv
from radixkv.service.engine.attention import PagedStep, use_paged_attention
from tests.tiny_models import build

HEADS, DIM, SIZE = (4, 2), 16, 4


def make_plan(query_lens: list[int], kv_lens: list[int]) -> AttentionPlan:
    counts = [-(-n // SIZE) for n in kv_lens]
    ids = iter(np.random.default_rng(0).permutation(40))
    tables = [[next(ids) for _ in range(n)] + [0] * (max(counts) - n) for n in counts]
    return AttentionPlan.build(query_lens, kv_lens, tables, SIZE)


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool.allocate(2, 40, SIZE, HEADS[1], DIM, dtype)
    torch.manual_seed(0)
    for layer in range(2):
        new = torch.randn(2, 40 * SIZE, HEADS[1], DIM)
        slots = torch.arange(40 * SIZE)
        scales = pool.k_scales[layer], pool.v_scales[layer]
        write_kv(new[0], new[1], pool.k[layer], pool.v[layer], slots, *scales)
    return pool


def news(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(n, HEADS[0], DIM, generator=generator)
    k, v = (torch.randn(HEADS[1], n, DIM, generator=generator).transpose(0, 1) for _ in "kv")
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_it_writes_the_layer_and_attends_as_the_two_calls_do(
    dtype: torch.dtype, backend: str
) -> None:
    plan = make_plan([1, 5, 1], [9, 12, 3])
    q, k, v = news(7)
    pools = make_pool(dtype), make_pool(dtype)
    sinks = torch.randn(HEADS[0])
    options: dict[str, Any] = {
        "scale": 0.3, "sliding_window": 6, "soft_cap": 4.0, "sinks": sinks, "backend": backend,
    }  # fmt: skip
    data, scales = pools[0].data, pools[0].scales
    got = write_and_attend(q, k, v, data, scales, number_of(plan), 1, **options)
    other = pools[1]
    scaled: dict[str, Any] = {"k_scales": other.k_scales[1], "v_scales": other.v_scales[1]}
    write_kv(k, v, other.k[1], other.v[1], plan.slots, **scaled)
    want = paged_attention(q, other.k[1], other.v[1], plan, **scaled, **options)
    assert torch.equal(got, want)
    assert torch.equal(data.view(torch.uint8), other.data.view(torch.uint8))


def test_the_operator_keeps_what_its_schema_says() -> None:
    """Mutation, aliasing, shapes without data, and functionalisation, as torch itself checks."""
    plan = make_plan([1, 5, 1], [9, 12, 3])
    q, k, v = news(7)
    for dtype in (torch.float32, torch.int8):
        pool = make_pool(dtype)
        args = (
            q, k, v, pool.data, pool.scales, torch.empty_like(q), number_of(plan), 1, 0.3, 6, None,
            None, None, "torch",
        )  # fmt: skip
        torch.library.opcheck(torch.ops.radixkv.paged_attention, args)


def test_a_plan_has_one_number_for_as_long_as_it_is_kept() -> None:
    plan, q, k, v, pool = make_plan([1], [3]), *news(1), make_pool()
    number = number_of(plan)
    assert number_of(plan) is number
    assert not torch.equal(number_of(make_plan([1], [3])), number)
    del plan
    gc.collect()
    with pytest.raises(ValueError, match="a plan that is still in use"):
        write_and_attend(q, k, v, pool.data, None, number, 0, scale=1.0)


def test_wrong_shapes_are_refused_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = news(3)
    pool, number = make_pool(), number_of(make_plan([3], [3]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="k, v must be the pool's heads"):
            write_and_attend(q, q, q, pool.data, None, number, 0, scale=1.0)
        assert write_and_attend(q, k, v, pool.data, None, number, 0, scale=1.0).shape == q.shape


class Steps:
    """A tiny model over a pool, asked eagerly and through whatever a compiler made of it."""

    def __init__(self, arch: str) -> None:
        self.model, _ = build(arch)
        use_paged_attention(self.model)
        config = self.model.config
        self.pools = [
            KVPool.allocate(
                config.num_hidden_layers, 40, SIZE, config.num_key_value_heads, config.head_dim,
                torch.float32,
            )
            for _ in range(2)
        ]  # fmt: skip

    def arguments(self, plan: AttentionPlan, which: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 300, (1, plan.num_tokens), generator=generator)
        step = PagedStep.of(self.pools[which], plan, "torch")
        return {
            "input_ids": ids, "position_ids": plan.positions[None], "use_cache": False,
            "radixkv": step,
        }  # fmt: skip

    def check(self, compiled: Any) -> None:
        plans = [make_plan([6, 3], [6, 3]), make_plan([4, 2, 5], [10, 5, 5])]
        plans.append(make_plan([2] * 7, [4, 9, 6, 11, 2, 5, 8]))
        for seed, plan in enumerate(plans):
            got = compiled(**self.arguments(plan, 1, seed)).logits
            want = self.model(**self.arguments(plan, 0, seed)).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(self.pools[1].data, self.pools[0].data, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_whole_model_compiles_without_a_break_and_serves_every_later_step() -> None:
    """One graph for the first shape, one for all others; no step is traced for its plan."""
    steps = Steps("llama")
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    steps.check(torch.compile(steps.model, fullgraph=True, backend=backend))
    assert len(traced) <= 2
    nodes = [n for n in traced[-1].graph.nodes if n.op == "call_function"]
    assert sum("radixkv" in str(n.target) for n in nodes) == 2


class Plain(torch.nn.Module):
    """The model asked with tensors alone, so that their shapes can be declared."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, data: torch.Tensor, plan: torch.Tensor
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            radixkv=PagedStep(data, None, plan, "torch"),
        ).logits
        return logits


@torch.no_grad()
def test_a_whole_model_is_exported_with_the_operator_in_it() -> None:
    steps = Steps("llama")
    plan = make_plan([6, 3], [6, 3])
    asked = steps.arguments(plan, 1, 9)
    args = (asked["input_ids"], asked["position_ids"], asked["radixkv"].data, number_of(plan))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = ({1: tokens}, {1: tokens}, None, None)
    program = torch.export.export(Plain(steps.model), args, dynamic_shapes=shapes)
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    assert sum("radixkv" in str(n.target) for n in nodes) == 2
    for other in (plan, make_plan([4, 2, 5], [10, 5, 5])):
        asked = steps.arguments(other, 1, 7)
        data = asked["radixkv"].data.zero_()
        ids, positions = asked["input_ids"], asked["position_ids"]
        got = program.module()(ids, positions, data, number_of(other))
        steps.pools[0].data.zero_()
        want = steps.model(**steps.arguments(other, 0, 7)).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
