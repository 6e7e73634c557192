"""Attention over quantised pools on backends that know no codes: the values that the codes mean."""

import dataclasses

import pytest
import torch

from radixkv.kernels.attention import paged_attention
from radixkv.kernels.quant import dequantise, quantise
from tests.kernel_cases import make_tree_case


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", ["torch", "native", "reference"])
def test_a_quantised_pool_is_attended_as_its_values(dtype: torch.dtype, backend: str) -> None:
    case = make_tree_case([(0, 0), (0, 20), (0, 20)], [1, 9, 1], [400, 500, 20], num_q_heads=6)
    clean = [pool.nan_to_num(0.0) for pool in (case.k_pool, case.v_pool)]
    (k, k_scales), (v, v_scales) = (quantise(pool, dtype) for pool in clean)
    values = dataclasses.replace(
        case, k_pool=dequantise(k, k_scales), v_pool=dequantise(v, v_scales)
    )
    got = paged_attention(
        case.q,
        k,
        v,
        case.plan,
        k_scales=k_scales,
        v_scales=v_scales,
        backend=backend,
        **case.options,
    )
    torch.testing.assert_close(got, values.run("reference"), rtol=1e-5, atol=1e-5)
