"""Tree attention of the torch backend: equal to float64 and to flat, with every feature."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from radixkv.kernels import torch_tree
from radixkv.kernels.attention import paged_attention
from radixkv.kernels.tree import CostModel
from tests.kernel_cases import Case, fresh_memory_is_nan, make_tree_case, tree_cases

__all__ = ["fresh_memory_is_nan"]
NEVER = CostModel(token=1.0, step=1e9)


@pytest.fixture(scope="module", autouse=True)
def sharing_is_free() -> Iterator[None]:
    """Share whatever can be shared, worth it or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_tree, "COST", CostModel(token=1.0))
        yield


def again(case: Case) -> Case:
    plan = case.plan
    tables = plan.host_block_tables
    new = type(plan).build(plan.host_query_lens, plan.host_kv_lens, tables, plan.block_size)
    return dataclasses.replace(case, plan=new)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree_cases(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
def test_a_tree_agrees_with_float64_on_any_step(case: Case) -> None:
    """CORRECT: poisoned blocks, slots past the length and keys outside the window never leak."""
    case.check("torch")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree_cases())
def test_a_tree_is_flat_attention_within_float32(case: Case) -> None:
    tree = case.run("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_tree, "COST", NEVER)
        flat = again(case).run("torch")
    torch.testing.assert_close(tree, flat, rtol=1e-5, atol=1e-5)


def test_several_levels_with_decoding_prefilling_and_strangers(fresh_memory_is_nan: None) -> None:
    """Every row is written, also of sequences that share nothing."""
    branches = [(0, 0), (0, 30), (0, 30), (2, 45), (2, 45), (0, 0)]
    for options in ({}, {"sinks": True}, {"soft_cap": 3.0, "alibi": True, "sinks": True}):
        case = make_tree_case(
            branches, [1, 1, 20, 1, 9, 3], [800] * 6, num_q_heads=6, num_kv_heads=2, **options
        )
        tree = torch_tree.tree_of(case.plan, None)
        assert tree is not None and len(tree.runs) == 2
        assert len(tree.prefills) == 2 and tree.flat_prefill.tolist() == [5]
        case.check("torch")


def test_a_run_is_read_once_for_all_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared 640 tokens make one product of 8 x 3 rows a key head, not eight."""
    case = make_tree_case([(0, 40)] * 8, [1] * 8, [700] * 8, num_q_heads=6, num_kv_heads=2)
    shapes: list[tuple[int, int]] = []
    fused: Any = vars(torch_tree)["flash"]

    def watched(q: torch.Tensor, k: torch.Tensor, *rest: object, **options: object) -> object:
        shapes.append((q.shape[2], k.shape[2]))
        return fused(q, k, *rest, **options)

    monkeypatch.setattr(torch_tree, "flash", watched)
    case.run("torch")
    assert shapes == [(24, 640), (3, 60)]


def test_a_window_that_hides_keys_stays_flat() -> None:
    case = make_tree_case([(0, 40)] * 3, [1] * 3, [700] * 3, sliding_window=699)
    assert torch_tree.tree_of(case.plan, 699) is None
    assert torch_tree.tree_of(case.plan, 700) is not None
    case.check("torch")


def test_layers_with_and_without_a_window_may_share_a_plan() -> None:
    case = make_tree_case([(0, 40)] * 3, [1, 1, 5], [700] * 3)
    for window in (None, 50, 5000, None):
        options: dict[str, Any] = {"scale": 0.1, "sliding_window": window}
        got, want = (
            paged_attention(case.q, case.k_pool, case.v_pool, case.plan, backend=backend, **options)
            for backend in ("torch", "reference")
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
