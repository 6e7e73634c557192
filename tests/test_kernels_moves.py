"""The kernels that write, move and attend over latents, three ways: interpreted here, compiled for
GPUs elsewhere, run where one is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from radixkv.kernels.copy import copy_blocks
from radixkv.kernels.gather import gather_blocks, scatter_blocks
from radixkv.kernels.mla import write_latents
from radixkv.kernels.write import write_kv
from tests.moves_cases import (
    FLOATS,
    QUANTISED,
    Shape,
    assert_same_bits,
    check_copy,
    check_swap,
    check_write,
    latent_case,
    moved,
)

if TYPE_CHECKING:
    from tests import triton_moves_compile
    from tests.triton_moves_compile import Job
else:
    triton_moves_compile = pytest.importorskip(
        "tests.triton_moves_compile", reason="triton is not installed", exc_type=ImportError
    )
    Job = triton_moves_compile.Job


def compiles_within_limits(job: Job) -> None:
    got = triton_moves_compile.compile_job(job)
    assert got.shared_bytes <= triton_moves_compile.SHARED_LIMIT[job.target], job
    if got.spilled is None:
        pytest.skip("this triton brings no cuobjdump, so spills cannot be read")
    assert got.spilled == 0, f"{got.spilled} bytes or registers spilled: {job}"


@pytest.mark.parametrize("job", triton_moves_compile.some_jobs(), ids=str)
def test_every_kernel_compiles_within_the_gpu_s_memory_and_registers(job: Job) -> None:
    compiles_within_limits(job)


@pytest.mark.soak
@pytest.mark.parametrize("job", triton_moves_compile.every_job(), ids=str)
def test_every_launch_compiles_within_the_gpu_s_memory_and_registers(job: Job) -> None:
    compiles_within_limits(job)


def test_the_kernels_are_right_in_the_interpreter() -> None:
    """Run in a process of its own: triton reads TRITON_INTERPRET once, when it is imported."""
    tests = Path(__file__).with_name("triton_moves_interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tests.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_on_the_cpu_the_kernels_name_the_interpreter_s_switch() -> None:
    from radixkv.kernels.triton_moves import copy_triton
    from radixkv.kernels.triton_write import write_triton

    pool = Shape(1, 2, 4, 2, 8, torch.float32, seed=0).pool()
    new = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        write_triton(new, new, pool.k[0], pool.v[0], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        copy_triton(pool, np.array([[0, 1, 4]]))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        latent_case([1], [4]).run("triton")


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, *QUANTISED], ids=str)
def test_the_gpu_moves_the_reference_s_bits(cuda: str, dtype: torch.dtype) -> None:
    for seed, (head_dim, block_size) in enumerate(
        ((64, 16), (80, 1), (7, 100), (128, 16), (256, 3))
    ):
        shape = Shape(2, 9, block_size, (3, 8)[seed % 2], head_dim, dtype, seed)
        check_copy(shape, cuda)
        check_swap(shape, cuda)
        for new in FLOATS:
            check_write(shape, new, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *QUANTISED], ids=str)
def test_the_public_calls_do_on_the_gpu_what_they_do_on_the_cpu(
    cuda: str, dtype: torch.dtype
) -> None:
    here = Shape(2, 6, 4, 3, 8, dtype, seed=0).pool()
    there = moved(here, cuda)
    torch.cuda.set_sync_debug_mode("error")  # neither call may wait for the GPU
    try:
        for pool in (there, here):
            device = pool.device
            new = torch.arange(5 * 24, dtype=torch.bfloat16).view(5, 3, 8)
            new, slots = (x.pin_memory().to(device, non_blocking=True) for x in
                          (new, torch.tensor([23, 0, 7, 8, 13])))  # fmt: skip
            write_kv(new, -new, pool.k[1], pool.v[1], slots, pool.k_scales[1], pool.v_scales[1])
            copy_blocks(pool, [0, 1, 2], [1, 2, 5], [4, 3, 0])
            ids = torch.arange(6, device=device)
            scatter_blocks(pool, ids[2:4] + 1, gather_blocks(pool, ids[1:3]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(there, here)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_latent_attention_on_the_gpu_agrees_with_float64(cuda: str, dtype: torch.dtype) -> None:
    lens = ([1, 1, 3, 0, 1], [1, 1500, 40, 7, 512])
    for heads, rank, rope, block_size in ((16, 512, 64, 16), (128, 512, 64, 64), (5, 48, 24, 3)):
        case = latent_case(*lens, heads=heads, rank=rank, rope=rope, block_size=block_size,
                           dtype=dtype, device=cuda)  # fmt: skip
        case.check("triton")
        assert torch.equal(case.run("auto"), case.run("triton"))
    new = torch.randn(3, 576, device=cuda).to(dtype)
    pool = torch.zeros(2, 4, 576, dtype=dtype, device=cuda)
    write_latents(new, pool, torch.tensor([5, -1, 2], device=cuda))
    assert torch.equal(pool.view(8, 576)[[5, 2]], new[[0, 2]])
    assert not pool.view(8, 576)[[0, 1, 3, 4, 6, 7]].any()
