"""Attention over latents gives what attention over the keys projected from them gives."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from radixkv.kernels.mla import mla_attention, write_latents
from radixkv.kernels.plan import AttentionPlan
from tests.moves_cases import LatentCase, latent_case, latent_cases


@settings(max_examples=60, deadline=None)
@given(latent_cases())
def test_torch_agrees_with_float64_on_any_step(case: LatentCase) -> None:
    """CORRECT: poisoned blocks and slots past the length never leak."""
    case.check("torch")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_absorbed_attention_equals_attention_over_projected_keys(backend: str) -> None:
    heads, rank, rope, nope, value_dim = 6, 32, 8, 24, 20
    kv_len, query_len = 50, 3
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w_k, w_v = randn(heads, nope, rank), randn(heads, value_dim, rank)
    latents, ropes = randn(kv_len, rank), randn(kv_len, rope)
    q_nope, q_rope = randn(query_len, heads, nope), randn(query_len, heads, rope)
    scale = (nope + rope) ** -0.5

    keys = torch.einsum("hnr,tr->htn", w_k, latents)
    keys = torch.cat([keys, ropes.expand(heads, -1, -1)], dim=2)
    values = torch.einsum("hvr,tr->htv", w_v, latents)
    queries = torch.cat([q_nope, q_rope], dim=2).transpose(0, 1)
    mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    want = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale
    ).transpose(0, 1)

    plan = AttentionPlan.build([query_len], [kv_len], [[3, 0, 2, 1]], 16)
    pool = torch.full((4, 16, rank + rope), torch.nan, dtype=torch.float64)
    slots = torch.from_numpy(plan.slots_of(0, 0, kv_len))
    write_latents(torch.cat([latents, ropes], dim=1), pool, slots)
    absorbed = torch.einsum("thn,hnr->thr", q_nope, w_k)
    got = mla_attention(absorbed, q_rope, pool, plan, scale=scale, backend=backend)
    bound = 1e-12 if backend == "reference" else 1e-5
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", got, w_v), want, rtol=bound, atol=bound)


def test_every_row_of_the_output_is_written() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        latent_case([2, 0, 1], [30, 4, 17]).check("torch")
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_on_the_cpu_is_torch_and_no_token_is_no_row() -> None:
    case = latent_case([1, 3], [5, 40])
    assert torch.equal(case.run("auto"), case.run("torch"))
    empty = latent_case([0], [5])
    assert empty.run("auto").shape == (0, 4, 64)


def test_wrong_arguments_are_named() -> None:
    case = latent_case([1], [5])
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"q_latent": case.q_latent[0]}, "q_latent"),
        ({"q_latent": case.q_latent[:0]}, "q_latent"),
        ({"q_rope": case.q_rope[:, :2]}, "q_rope"),
        ({"q_rope": case.q_rope.bfloat16()}, "q_rope"),
        ({"pool": case.pool[..., :70]}, "pool_layer"),
    )
    for changed, name in wrong:
        with pytest.raises(ValueError, match=f"{name} must be"):
            dataclasses.replace(case, **changed).run("torch")
    with pytest.raises(ValueError, match="backend must be"):
        case.run("cuda")


def test_latents_land_in_their_slots_and_nowhere_else() -> None:
    pool = torch.randn(3, 4, 10).bfloat16()
    expected = pool.clone()
    new, slots = torch.randn(3, 10), torch.tensor([11, 0, 6])
    for t, slot in enumerate(slots.tolist()):
        expected[slot // 4, slot % 4] = new[t].bfloat16()
    write_latents(new, pool, slots)
    assert torch.equal(pool, expected)
    with pytest.raises(IndexError):
        write_latents(new, pool, torch.tensor([1, 2, 12]))
    with pytest.raises(ValueError, match="slots must be"):
        write_latents(new, pool, slots[:2])
    assert torch.equal(pool, expected)
