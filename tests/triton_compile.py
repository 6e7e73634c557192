"""Compiles the Triton attention kernel for GPUs that need not be here, and reads what came out.

Apart from the tests, so that several processes can compile at once.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels.features import Features
from radixkv.kernels.triton_attention import _paged_attention_kernel, constants
from radixkv.kernels.triton_config import choose_launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Variant:
    """One thing to compile; everything that the compiler specialises on follows from it."""

    target: str
    dtype: str
    head_dim: int
    decode: bool
    block_size: int
    everything: bool  # window, soft cap, sinks and ALiBi, or none of them
    group: int = 4


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a variant."""

    shared_bytes: int
    spilled: int | None  # bytes of stack (cuda) or vector registers (hip); None: not readable here


def compile_variant(variant: Variant) -> Compiled:
    """Compile as a launch would: same constants, options, and alignment of the arguments."""
    dtype = getattr(torch, variant.dtype)
    one = torch.ones(1)
    features = Features(1.0, 9, 9.0, one, one) if variant.everything else Features(1.0)
    launch = choose_launch(dtype, variant.head_dim, variant.group, variant.decode)
    fixed = constants(launch, variant.group, variant.block_size, features)
    element = "*" + DTYPES[variant.dtype]
    vector = "*fp32" if variant.everything else element
    types = dict.fromkeys(("q", "k_pool", "v_pool", "out"), element)
    types |= dict.fromkeys(("work", "cu_seqlens_q", "kv_lens", "block_tables"), "*i32")
    types |= {"sinks": vector, "slopes": vector, "scale": "fp32", "soft_cap": "fp32"}
    names = _paged_attention_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in ("q_row_stride", "q_head_stride")
    }
    kernel = triton.compile(
        ASTSource(_paged_attention_kernel, signature, fixed, aligned),
        target=TARGETS[variant.target],
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    return Compiled(kernel.metadata.shared, _spilled(kernel.asm))


def _spilled(asm: dict[str, bytes | str]) -> int | None:
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
