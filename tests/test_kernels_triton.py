"""Triton attention, interpreted here and run where a GPU is; compiled for others elsewhere."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from radixkv.kernels.triton_config import (
    SMALL_BYTES,
    Family,
    choose_launch,
    run_tokens,
    split_tokens,
)
from tests.kernel_cases import make_case, random_pool
from tests.triton_cases import FLAT, POOLS, SHARE, make_step

pytest.importorskip("triton", reason="triton is not installed")


def test_the_kernel_is_right_in_the_interpreter() -> None:
    """Run in a process of its own: triton reads TRITON_INTERPRET once, when it is imported."""
    tests = Path(__file__).with_name("triton_interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tests.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_each_program_holds_all_heads_of_a_group_and_splits_hold_whole_tiles() -> None:
    for dtype, quantised in ((torch.float32, False), (torch.bfloat16, False), (torch.half, True)):
        for group, room in itertools.product((1, 3, 7, 8, 16, 64), (SMALL_BYTES, 227 << 10)):
            assert run_tokens(group) % split_tokens(group) == 0
            for family in get_args(Family):
                launch = choose_launch(family, dtype, 80, group, quantised, room)
                assert launch.block_m >= group and launch.block_m >= 16
                assert launch.head_pad == 128
                assert split_tokens(group) % launch.tile == 0


def test_on_the_cpu_it_names_the_interpreter_s_switch() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        make_case([1], [4]).run("triton")


def test_without_triton_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="package 'triton'"):
        make_case([1], [4]).run("triton")


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gpu_agrees_with_float64(cuda: str, dtype: torch.dtype) -> None:
    lens = ([1, 1, 200, 1, 33, 0], [1, 1000, 700, 257, 33, 9])
    features: tuple[dict[str, Any], ...] = (
        {},
        {"sliding_window": 90},
        {"soft_cap": 5.0, "sinks": True, "alibi": True},
    )
    sizes = itertools.product((64, 80, 96, 128, 256), (1, 16, 100, 256), ((9, 3), (4, 4), (16, 1)))
    for turn, (head_dim, block_size, heads) in enumerate(sizes):
        make_case(
            *lens,
            dtype=dtype,
            head_dim=head_dim,
            block_size=block_size,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            device=cuda,
            **features[turn % 3],
        ).check("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gpu_agrees_with_float64_under_shared_runs_of_any_pool(
    cuda: str, dtype: torch.dtype, pool_dtype: torch.dtype | None
) -> None:
    from radixkv.kernels.triton_attention import Tuning, paged_attention_triton

    prompt, document = np.arange(64), np.arange(64, 128)
    for turn, (head_dim, group) in enumerate(itertools.product((64, 80, 128, 256), (1, 4, 7))):
        tables = np.full((20, 160), 127, dtype=np.int32)
        for s in range(20):
            row = [*prompt, *(document if s % 2 else [])]
            tables[s, : len(row)] = row
            tables[s, len(row) :] = 128 + 160 * s + np.arange(160 - len(row))
        kv_lens = [(2048 if s % 2 else 1024) + 37 * s + 9 for s in range(20)]
        step = make_step(
            [1, 1, 5, 1] * 5,
            kv_lens,
            tables,
            16,
            group=group,
            head_dim=head_dim,
            dtype=dtype,
            pool_dtype=pool_dtype,
            features=("soft cap", "sinks", "alibi") if turn % 2 else (),
            sliding_window=1700 if turn % 3 == 2 else None,
            device=cuda,
        )
        for cost in (SHARE, FLAT):
            got = paged_attention_triton(
                step.q,
                step.k_pool,
                step.v_pool,
                step.plan,
                step.features,
                step.k_scales,
                step.v_scales,
                tuning=Tuning(split_tokens(group), run_tokens(group), cost),
            )
            step.check(got)


@pytest.mark.gpu
def test_a_captured_step_replays_with_other_lengths(cuda: str) -> None:
    case = make_case([1] * 8, [1000] * 8, device=cuda, dtype=torch.bfloat16)
    case.run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run("triton")
    lengths = torch.tensor([1, 1000, 256, 257, 999, 3, 512, 0], dtype=torch.int32)
    case.plan.kv_lens.copy_(lengths)
    graph.replay()
    for s, length in enumerate(lengths.tolist()[:-1]):
        tables = case.plan.host_block_tables[s : s + 1]
        plan = type(case.plan).build([1], [length], tables, 16, cuda)
        alone = type(case)(case.q[s : s + 1], case.k_pool, case.v_pool, plan, case.options)
        assert torch.equal(captured[s], alone.run("triton")[0])
    assert (captured[7] == 0).all()


@pytest.mark.gpu
def test_the_gpu_is_what_auto_means_there_and_torch_agrees(cuda: str) -> None:
    case = make_case([1, 60], [300, 200], device=cuda)
    assert torch.equal(case.run("auto"), case.run("triton"))
    case.check("torch")


@pytest.mark.gpu
def test_blocks_move_on_the_gpu_as_on_the_cpu(cuda: str) -> None:
    from radixkv.kernels.copy import copy_blocks
    from radixkv.kernels.gather import gather_blocks, scatter_blocks
    from radixkv.kernels.layout import KVPool
    from radixkv.kernels.write import write_kv

    def moves(pool: KVPool) -> None:
        new = torch.arange(5 * 24, dtype=pool.dtype, device=pool.device).view(5, 3, 8)
        slots = torch.tensor([23, 0, 7, 8, 13], device=pool.device)
        write_kv(new, -new, pool.k[1], pool.v[1], slots)
        copy_blocks(pool, [0, 1, 2], [1, 2, 5], [4, 3, 0])
        records = gather_blocks(pool, torch.tensor([2, 1], device=pool.device))
        scatter_blocks(pool, torch.tensor([4, 3], device=pool.device), records)

    here = random_pool()
    there = KVPool.over(here.data.to(cuda))
    run: Callable[[KVPool], None] = moves
    run(here)
    run(there)
    assert torch.equal(there.data.cpu(), here.data)
