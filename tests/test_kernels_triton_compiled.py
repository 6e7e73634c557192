"""Every Triton attention kernel and launch, compiled for GPUs that need not be here."""

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from radixkv.kernels.triton_config import choose_launch

if TYPE_CHECKING:
    from tests import triton_compile
    from tests.triton_compile import Compiled, MergeVariant, Variant
else:
    triton_compile = pytest.importorskip(
        "tests.triton_compile", reason="triton is not installed", exc_type=ImportError
    )
    Compiled, Variant = triton_compile.Compiled, triton_compile.Variant
    MergeVariant = triton_compile.MergeVariant

Any_ = Variant | MergeVariant

POOLS = (
    ("float32", "float32"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "e4m3"),
    ("float16", "int8"),
)
BLOCK_SIZES = (16, 256, 100)  # smaller than a tile of keys, a multiple of one, neither
CHOICES: tuple[Sequence[Any], ...] = (
    tuple(triton_compile.TARGETS),
    ("prefill", "decode", "tree"),
    POOLS,
    (64, 80, 128, 256),
    (1, 7, 16),
    BLOCK_SIZES,
    (False, True),
    (False, True),
)


def variant(choice: tuple[Any, ...]) -> Variant:
    target, family, (dtype, pool), *rest = choice
    return Variant(target, family, dtype, pool, *rest)


def met(choice: tuple[Any, ...]) -> set[Any]:
    """Say what compiling a choice covers: the launch, and each pair of its values."""
    v = variant(choice)
    room = triton_compile.SHARED_LIMIT[v.target]
    quantised = v.pool != v.dtype
    launch = choose_launch(v.family, getattr(torch, v.dtype), v.head_dim, v.group, quantised, room)
    sizes = (launch.head_pad, launch.block_m, launch.tile, launch.num_warps)
    pairs = itertools.combinations(enumerate(choice), 2)
    return {(v.family, v.dtype == "float32", quantised, sizes), *pairs}


def covering() -> list[Variant]:
    """Choose few variants in which every launch occurs, and every two values meet.

    Greedily, from the same candidates each time.
    """
    rng = random.Random(0)
    missing = set().union(*map(met, itertools.product(*CHOICES)))
    chosen = []
    while missing:
        some = [c for c in missing if len(c) == 2]
        candidates = [tuple(map(rng.choice, CHOICES)) for _ in range(150)]
        if some:  # one of the candidates covers something for certain
            candidates += [fix(c, rng) for c in sorted(some, key=repr)[:20]]
        best = max(candidates, key=lambda c: len(met(c) & missing))
        gained = met(best) & missing
        if gained:
            missing -= gained
            chosen.append(variant(best))
    return chosen


def fix(pair: Any, rng: random.Random) -> tuple[Any, ...]:
    fixed = dict(pair)
    return tuple(fixed.get(i, rng.choice(values)) for i, values in enumerate(CHOICES))


def merges() -> list[MergeVariant]:
    """List targets, head sizes and types in turn; sinks cost an instruction."""
    sizes = itertools.cycle(((64, "float32"), (80, "float16"), (256, "bfloat16")))
    return [
        MergeVariant(t, dtype, d, True) for t, (d, dtype) in zip(CHOICES[0], sizes, strict=False)
    ]


def everything() -> Iterator[Any_]:
    """List the product of all that sizes follow from, for the patient; features take turns."""
    heads, groups = (64, 80, 96, 128, 256), (1, 8, 32)
    pools = (*POOLS, ("float16", "float16"), ("float16", "e4m3"), ("float32", "e4m3"))
    turns = itertools.cycle(itertools.product(BLOCK_SIZES, (False, True), (False, True)))
    for choice in itertools.product(*CHOICES[:2], pools, heads, groups):
        yield variant((*choice, *next(turns)))
    for target, dtype, head_dim in itertools.product(CHOICES[0], ("float32", "bfloat16"), heads):
        yield from (MergeVariant(target, dtype, head_dim, sinks) for sinks in (False, True))


Results = dict[Any_, Future[Compiled]]


def compile_all(wanted: Sequence[Any_]) -> Results:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=spawn) as pool:
        return {v: pool.submit(triton_compile.compile_variant, v) for v in wanted}


def check(variant: Any_, got: Compiled) -> None:
    assert got.shared_bytes <= triton_compile.SHARED_LIMIT[variant.target], variant
    if got.spilled is None:
        pytest.skip("this triton brings no cuobjdump, so spills cannot be read")
    assert got.spilled == 0, f"{got.spilled} bytes or registers spilled: {variant}"


CHOSEN: list[Any_] = [*covering(), *merges()]


@pytest.fixture(scope="module")
def compiled() -> Results:
    return compile_all(CHOSEN)


@pytest.mark.parametrize("variant", CHOSEN, ids=str)
def test_every_launch_compiles_within_the_gpu_s_memory_and_registers(
    compiled: Results, variant: Any_
) -> None:
    check(variant, compiled[variant].result())


@pytest.mark.soak
def test_every_combination_compiles_within_the_gpu_s_memory_and_registers() -> None:
    for variant, future in compile_all(list(everything())).items():
        check(variant, future.result())
