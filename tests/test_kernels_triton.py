"""The Triton kernel three ways: interpreted here, compiled for GPUs elsewhere, run where one is."""

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from radixkv.kernels.triton_config import choose_launch
from tests.kernel_cases import make_case, random_pool

if TYPE_CHECKING:
    from tests import triton_compile
    from tests.triton_compile import Compiled, Variant
else:
    triton_compile = pytest.importorskip(
        "tests.triton_compile", reason="triton is not installed", exc_type=ImportError
    )
    Compiled, Variant = triton_compile.Compiled, triton_compile.Variant

BLOCK_SIZES = (16, 256, 100)  # smaller than a tile of keys, a multiple of one, neither


def variants() -> list[Variant]:
    """List target x (float32, a half type) x head size x phase: all sizes that can be launched.

    The half types share their sizes and take turns, as do block sizes, and features on or off.
    """
    found = []
    for g, target in enumerate(triton_compile.TARGETS):
        for d, head_dim in enumerate((64, 80, 256)):
            for decode in (False, True):
                turn = g + d + decode
                for dtype in ("float32", ("bfloat16", "float16")[turn % 2]):
                    block_size, everything = BLOCK_SIZES[turn % 3], (g + d) % 2 == 0
                    found.append(Variant(target, dtype, head_dim, decode, block_size, everything))
    return found


def every_variant() -> list[Variant]:
    """List the whole product, for the patient."""
    return [
        Variant(target, dtype, head_dim, decode, block_size, everything, group)
        for target in triton_compile.TARGETS
        for dtype in triton_compile.DTYPES
        for head_dim in (64, 80, 96, 128, 256)
        for decode in (False, True)
        for block_size in BLOCK_SIZES
        for everything in (False, True)
        for group in (1, 3, 8)
    ]


Results = dict[Variant, Future[Compiled]]


def compile_all(wanted: list[Variant]) -> Results:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=spawn) as pool:
        return {v: pool.submit(triton_compile.compile_variant, v) for v in wanted}


def check(variant: Variant, got: Compiled) -> None:
    assert got.shared_bytes <= triton_compile.SHARED_LIMIT[variant.target], variant
    if got.spilled is None:
        pytest.skip("this triton brings no cuobjdump, so spills cannot be read")
    assert got.spilled == 0, f"{got.spilled} bytes or registers spilled: {variant}"


@pytest.fixture(scope="module")
def compiled() -> Results:
    return compile_all(variants())


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_every_launch_compiles_within_the_gpu_s_memory_and_registers(
    compiled: Results, variant: Variant
) -> None:
    check(variant, compiled[variant].result())


@pytest.mark.soak
def test_every_combination_compiles_within_the_gpu_s_memory_and_registers() -> None:
    for variant, future in compile_all(every_variant()).items():
        check(variant, future.result())


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


def test_each_program_holds_all_heads_of_a_group() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for group in (1, 3, 7, 8, 16, 64):
            for decode in (True, False):
                launch = choose_launch(dtype, 80, group, decode)
                assert launch.block_m >= group and launch.block_m >= 16
                assert launch.head_pad == 128


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
