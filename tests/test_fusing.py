"""Merged projections compute what the separate ones did, and stay one with their names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from radixkv.service.engine.fusing import (
    ProjectionPart,
    join_norms,
    merge_projections,
    use_kernels,
)
from tests import tiny_models


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_a_merged_model_gives_the_same_logits(arch: str) -> None:
    model, _ = tiny_models.build(arch)
    merged = copy.deepcopy(model)
    assert merge_projections(merged) == 2 * model.config.num_hidden_layers
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected, got = model(ids).logits, merged(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("arch", "norms"), [("llama", 5), ("qwen3", 9), ("gemma3", 0)])
def test_norms_of_one_call_give_the_same_logits(arch: str, norms: int) -> None:
    model, _ = tiny_models.build(arch)
    joined = copy.deepcopy(model)
    assert join_norms(joined) == norms
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected, got = model(ids).logits, joined(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_one_row_through_our_kernels_gives_the_same_logits(arch: str) -> None:
    model, _ = tiny_models.build(arch)
    ours = copy.deepcopy(model)
    merge_projections(ours)
    assert use_kernels(ours) == 2 * model.config.num_hidden_layers + 1
    ids = torch.tensor([[7]])
    with torch.inference_mode():
        expected, got = model(ids).logits, ours(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_norms_keep_their_rounding() -> None:
    model, _ = tiny_models.build("llama", dtype=torch.bfloat16)
    assert join_norms(model) == 0


def test_names_and_values_stay_and_writing_one_reaches_the_product() -> None:
    model, _ = tiny_models.build("qwen2")  # its projections have biases
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_projections(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 3, 64)
    attention.k_proj.weight.data.zero_()
    attention.k_proj.bias.data.fill_(2.0)
    assert torch.equal(attention.k_proj(x), torch.full((1, 3, 32), 2.0))
    assert not torch.equal(attention.q_proj(x), torch.zeros(1, 3, 64))


def test_each_part_answers_for_the_tensor_it_is_given() -> None:
    """Asked in any order, repeatedly, or with equal but different tensors."""
    model, _ = tiny_models.build("llama")
    attention = model.model.layers[0].self_attn
    own = {name: copy.deepcopy(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")}
    merge_projections(model)
    x, y = torch.randn(1, 4, 64), torch.randn(1, 4, 64)
    for name, value in (
        ("q_proj", x),
        ("k_proj", y),
        ("v_proj", x),
        ("q_proj", x),
        ("q_proj", x),
        ("q_proj", x),
        ("q_proj", x),
        ("k_proj", y.clone()),
    ):
        torch.testing.assert_close(getattr(attention, name)(value), own[name](value))


def test_the_input_is_let_go_when_every_part_has_answered() -> None:
    model, _ = tiny_models.build("llama")
    merge_projections(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 4, 64)
    mlp.gate_proj(x)
    mlp.up_proj(x)
    assert mlp.up_proj._merged._input is None


def test_layers_with_ways_of_their_own_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    model, _ = tiny_models.build("llama")
    model.model.layers[0].self_attn.k_proj = Adapted(64, 32, bias=False)
    merge_projections(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert type(model.model.layers[1].self_attn.q_proj) is ProjectionPart
