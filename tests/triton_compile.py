"""Compiles the Triton attention kernels for GPUs that need not be here, and reads what came out.

Apart from the tests, so that several processes can compile at once.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels.features import Features
from radixkv.kernels.triton_call import constants
from radixkv.kernels.triton_config import Family, choose_launch, split_tokens
from radixkv.kernels.triton_decode import _decode_kernel
from radixkv.kernels.triton_merge import OPTIONS, _merge_kernel, merge_constants
from radixkv.kernels.triton_prefill import _prefill_kernel
from radixkv.kernels.triton_tree import _tree_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
KERNELS = {"prefill": _prefill_kernel, "decode": _decode_kernel, "tree": _tree_kernel}
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "i8", "e4m3": "u8"}


@dataclass(frozen=True)
class Variant:
    """One thing to compile; everything that the compiler specialises on follows from it."""

    target: str
    family: Family
    dtype: str
    pool: str  # like dtype, or int8 or e4m3
    head_dim: int
    group: int
    block_size: int
    window: bool
    extras: bool  # soft cap, sinks and ALiBi


@dataclass(frozen=True)
class MergeVariant:
    """The same for the kernel that merges partial results."""

    target: str
    dtype: str
    head_dim: int
    sinks: bool


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a variant."""

    shared_bytes: int
    spilled: int | None  # bytes of stack (cuda) or vector registers (hip); None: not readable here


def compile_variant(variant: Variant | MergeVariant) -> Compiled:
    """Compile as a launch would: same constants, options, and alignment of the arguments."""
    if isinstance(variant, MergeVariant):
        fixed: dict[str, Any] = dict(merge_constants(variant.head_dim, variant.sinks))
        types = dict.fromkeys(("part_sums", "part_peaks", "part_totals", "sinks"), "*fp32")
        types |= {"out": "*" + TYPES[variant.dtype], "work": "*i32"}
        return _compile(_merge_kernel, variant.target, types, fixed, OPTIONS)
    one = torch.ones(1)
    extras = (9.0, one, one) if variant.extras else (None, None, None)
    features = Features(1.0, 9 if variant.window else None, *extras)
    room = SHARED_LIMIT[variant.target]
    dtype = getattr(torch, variant.dtype)
    quantised = variant.pool != variant.dtype
    launch = choose_launch(variant.family, dtype, variant.head_dim, variant.group, quantised, room)
    fixed = constants(launch, variant.group, variant.block_size, features, quantised)
    if variant.family == "decode":
        fixed["SPLIT"] = split_tokens(variant.group)
    element, pool = "*" + TYPES[variant.dtype], "*" + TYPES[variant.pool]
    types = {"q": element, "out": element, "k_pool": pool, "v_pool": pool}
    types |= dict.fromkeys(("part_sums", "part_peaks", "part_totals"), "*fp32")
    types |= dict.fromkeys(("k_scales", "v_scales"), "*fp32" if quantised else element)
    types |= dict.fromkeys(("sinks", "slopes"), "*fp32" if variant.extras else element)
    types |= dict.fromkeys(("work", "run_queries", "cu_seqlens_q", "kv_lens"), "*i32")
    types |= {"block_tables": "*i32", "positions": "*i64", "scale": "fp32", "soft_cap": "fp32"}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options["enable_fp_fusion"] = True
    return _compile(KERNELS[variant.family], variant.target, types, fixed, options)


def _compile(
    kernel: Any, target: str, types: dict[str, str], fixed: dict[str, Any], options: dict[str, Any]
) -> Compiled:
    def aligned(name: str) -> bool:
        return types.get(name, "i32").startswith("*") or name in ("q_row_stride", "q_head_stride")

    return compile_kernel(kernel, target, types, fixed, options, aligned)


def compile_kernel(
    kernel: Any,
    target: str,
    types: dict[str, str],
    fixed: dict[str, Any],
    options: dict[str, Any],
    aligned: Callable[[str], bool],
) -> Compiled:
    """Compile for a target of TARGETS; arguments are int32 unless ``types`` or ``fixed`` say else.

    ``aligned`` tells of an argument that is not fixed whether it is a multiple of 16.
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    sixteens = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in fixed and aligned(n)
    }
    source = ASTSource(kernel, signature, fixed, sixteens)
    compiled = triton.compile(source, target=TARGETS[target], options=dict(options))
    return Compiled(compiled.metadata.shared, spilled(compiled.asm))


def spilled(asm: dict[str, bytes | str]) -> int | None:
    """Read spills: of NVIDIA's from the binary's stack, of AMD's from the assembly's metadata.

    AMD's scalar registers spill into lanes of vector registers, not to memory: not counted.
    """
    if "amdgcn" in asm:
        return sum(int(n) for n in re.findall(r"vgpr_spill_count:\s*(\d+)", str(asm["amdgcn"])))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(bytes(asm["cubin"]))  # type: ignore[arg-type]
    try:
        shown = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    finally:
        os.unlink(file.name)
    sizes = re.findall(r"STACK:(\d+)", shown)
    return sum(map(int, sizes)) if sizes else None
