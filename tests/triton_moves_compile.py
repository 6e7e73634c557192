"""Compiles the kernels that write, move and quantise, and latent attention, for GPUs elsewhere.

Every kernel with every set of constants, types and options that its wrapper can launch it with, but
for head sizes and types that behave alike, of which some stand for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.kernels import triton_mla, triton_moves, triton_write
from tests.triton_compile import SHARED_LIMIT, TARGETS, Compiled, compile_kernel

__all__ = ["SHARED_LIMIT"]

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTISED = ("i8", "u8")


@dataclass(frozen=True)
class Job:
    """A kernel and all that the compiler specialises it on."""

    name: str
    target: str
    kernel: str  # "module.attribute"
    types: tuple[tuple[str, str], ...]  # of arguments that are no int32
    fixed: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    loose: tuple[str, ...] = ()  # integers that need not be multiples of 16

    def __str__(self) -> str:
        return f"{self.name}-{self.target}"


def compile_job(job: Job) -> Compiled:
    """Compile as a launch would: same constants, options, and alignment of the arguments."""
    module, attribute = job.kernel.split(".")
    kernel = getattr({m.__name__.rpartition(".")[2]: m for m in MODULES}[module], attribute)
    types = dict(job.types)

    def aligned(name: str) -> bool:
        return name not in job.loose and not types.get(name, "i32").startswith("fp")

    return compile_kernel(kernel, job.target, types, dict(job.fixed), dict(job.options), aligned)


MODULES = (triton_mla, triton_moves, triton_write)


def every_job() -> list[Job]:
    """List everything that can be launched, for the patient."""
    return [job for target in TARGETS for job in (*_writes(target), *_moves(target), *_mla(target))]


def some_jobs() -> list[Job]:
    """List every kernel for every target; types and sizes take turns at one target or another.

    The wide latent kernels take seconds each: every target has one, every launch but float32's too.
    """
    found = []
    for turn, target in enumerate(TARGETS):
        a, b, c = turn % 3, (turn + 1) % 3, (turn + 2) % 3
        # Of every new type 5 types of pool, the last two of them quantised.
        writes, moves, latents = (list(make(target)) for make in (_writes, _moves, _mla))
        found += [writes[5 * a + 3], writes[5 * b + 4], writes[5 * c + a]]
        # A copy and both swaps, of each width of words without scales and with.
        found += [moves[3 * (2 * a + 1)], *moves[6 * b + 1 : 6 * b + 3]]
        plain = [job for job in latents if "split" not in job.kernel]
        found += [job for job in plain if job.name.endswith(tuple(FLOATS)[a])]
        half = [job for job in latents if "split" in job.kernel and "rank 512" in job.name]
        found.append(half[(3, 4, 2, 5)[turn]])
    return found


def _job(name: str, target: str, kernel: str, types: dict[str, str], fixed: dict[str, Any],
         options: dict[str, Any], loose: tuple[str, ...] = ()) -> Job:  # fmt: skip
    given = (tuple(types.items()), tuple(fixed.items()), tuple(options.items()))
    return Job(name, target, kernel, *given, loose)


def _writes(target: str) -> Iterator[Job]:
    for turn, (new, pool) in enumerate((n, p) for n in FLOATS for p in (*FLOATS, *QUANTISED)):
        head_dim = (64, 80, 128, 256, 96)[turn % 5]
        scale = "*fp32" if pool in QUANTISED else f"*{pool}"
        types = dict.fromkeys(("k", "v"), f"*{new}") | {"slots": "*i64"}
        types |= dict.fromkeys(("k_pool", "v_pool"), f"*{pool}")
        types |= dict.fromkeys(("k_scales", "v_scales"), scale)
        yield _job(f"write {new} as {pool} {head_dim}", target, "triton_write._write_kernel",
                   types, triton_write.constants(head_dim), triton_write.options(),
                   ("num_rows", "num_heads", "num_slots"))  # fmt: skip


def _moves(target: str) -> Iterator[Job]:
    options, tile = triton_moves.options(), triton_moves.TILE
    for word in ("i32", "i16", "u8"):
        for scaled in (False, True):
            data = dict.fromkeys(("data", "scales", "to_data", "to_scales", "records"), f"*{word}")
            fixed = {"HAS_SCALES": scaled, "TILE": tile}
            loose = ("num_blocks", "to_num_blocks", "num_planes")
            yield _job(f"copy {word} scales {scaled}", target, "triton_moves._copy_kernel",
                       data | {"moves": "*i32"}, fixed, options, loose)  # fmt: skip
            for to_pool, ids in ((False, "*i64"), (True, "*i32")):
                yield _job(f"swap {word} scales {scaled} to pool {to_pool}", target,
                           "triton_moves._swap_kernel", data | {"ids": ids},
                           fixed | {"TO_POOL": to_pool}, options, loose)  # fmt: skip


def _mla(target: str) -> Iterator[Job]:
    plain = triton_mla.OPTIONS
    for turn, (name, dtype) in enumerate(FLOATS.items()):
        rows = dict.fromkeys(("latents", "pool", "q_latent", "q_rope", "out"), f"*{name}")
        rows |= {"parts": "*fp32", "masses": "*fp32", "scale_log2": "fp32", "slots": "*i64"}
        rows |= dict.fromkeys(("work", "block_tables", "ends"), "*i32")
        yield _job(f"merge latents {name}", target, "triton_mla._merge_kernel", rows,
                   triton_mla.merge_constants(512), plain, ("num_heads",))  # fmt: skip
        yield _job(f"write latents {name}", target, "triton_mla._write_latents_kernel", rows,
                   triton_mla.write_constants(576), plain, ("num_rows", "num_slots"))  # fmt: skip
        for heads in (16, 128):
            launch = triton_mla.choose_launch(dtype, heads, SHARED_LIMIT[target])
            for rank, rope in ((512, 64), (256, 32)):
                fixed = triton_mla.split_constants(launch, rank, rope, (16, 64, 1)[turn])
                options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages,
                           "enable_fp_fusion": True}  # fmt: skip
                yield _job(f"latents {name}, {heads} heads, rank {rank}", target,
                           "triton_mla._split_kernel", rows, fixed, options,
                           ("table_stride", "num_heads"))  # fmt: skip
