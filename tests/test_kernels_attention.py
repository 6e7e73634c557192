"""The torch backend of paged attention against float64, and the front door all backends share."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from radixkv.kernels.attention import choose_backend, paged_attention
from tests.kernel_cases import Case, cases, fresh_memory_is_nan, make_case

__all__ = ["fresh_memory_is_nan"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(dtypes=DTYPES))
def test_torch_agrees_with_float64_on_any_step(case: Case) -> None:
    """CORRECT: poisoned blocks, slots past the length and keys outside the window never leak."""
    case.check("torch")


def test_the_reference_agrees_with_softmax_written_out_by_hand() -> None:
    case = make_case([1], [3], num_q_heads=1, num_kv_heads=1, block_size=2)
    keys = case.plan.slots_of(0, 0, 3)
    k = case.k_pool.flatten(0, 1)[keys, 0].double()
    v = case.v_pool.flatten(0, 1)[keys, 0].double()
    weights = [float(torch.exp((case.q[0, 0].double() @ k[j]) / 8)) for j in range(3)]
    want = sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(case.run("reference")[0, 0].double(), want, rtol=1e-6, atol=1e-6)


def test_padding_entries_of_a_table_are_never_looked_up() -> None:
    case = make_case([1, 5], [3, 40])
    tables = case.plan.host_block_tables.copy()
    tables[0, 1:] = 10**6
    tables[1, 3:] = -1
    plan = type(case.plan).build([1, 5], [3, 40], tables, 16)
    outside = Case(case.q, case.k_pool, case.v_pool, plan, case.options)
    assert torch.equal(outside.run("torch"), case.run("torch"))


def test_what_is_batched_together_does_not_change_a_sequence() -> None:
    """CORRECT: a row of a batch is the row alone, within the last bits of float32."""
    lens = ([1, 1, 7, 1, 20, 1], [900, 3, 130, 17, 20, 901])
    case = make_case(*lens, num_q_heads=9, num_kv_heads=3)
    together = case.run("torch")
    for s in range(len(lens[0])):
        start, stop = case.plan.host_cu_seqlens_q[s : s + 2]
        plan = type(case.plan).build(
            [lens[0][s]], [lens[1][s]], case.plan.host_block_tables[s : s + 1], 16
        )
        alone = Case(case.q[start:stop], case.k_pool, case.v_pool, plan, case.options)
        torch.testing.assert_close(alone.run("torch"), together[start:stop], rtol=1e-5, atol=1e-5)


def test_a_step_of_nothing_gives_nothing() -> None:
    for lens in (([], []), ([0, 0], [0, 5])):
        assert make_case(*lens).run("torch").shape == (0, 4, 64)


def test_auto_means_the_device_s_backend_and_unknown_ones_are_named() -> None:
    case = make_case([1], [4])
    assert torch.equal(case.run("auto"), case.run(choose_backend(case.q.device)))
    with pytest.raises(ValueError, match="backend must be one of auto, reference, torch, native"):
        case.run("cuda")


def test_arguments_that_do_not_fit_the_plan_are_named() -> None:
    case = make_case([1, 3], [4, 9])
    q, k_pool, v_pool = case.q, case.k_pool, case.v_pool
    half = k_pool[:, :8].contiguous()
    for bad, pools, words in (
        (q[:3], (k_pool, v_pool), "q must be of the plan's 4 rows"),
        (q[..., :32], (k_pool, v_pool), "head_dim 64"),
        (q[:, :3], (k_pool, v_pool), "multiple of 2 heads"),
        (q, (k_pool, half), "v_pool_layer must be"),
        (q, (half, half), "block size 16"),
    ):
        with pytest.raises(ValueError, match=words):
            paged_attention(bad, *pools, case.plan, scale=1.0, backend="torch")


def test_every_row_of_the_output_is_written(fresh_memory_is_nan: None) -> None:
    make_case([3, 1, 40, 0, 1], [3, 80, 64, 5, 1], num_q_heads=14).check("torch")
