"""What every attention kernel is given: tensors, strides and the constants it is compiled for.

Knows names and shapes; which rows and keys a program attends is in the work lists.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from radixkv.kernels.checks import expect
from radixkv.kernels.features import Features
from radixkv.kernels.plan import AttentionPlan
from radixkv.kernels.quant import LIMIT, stored
from radixkv.kernels.triton_config import Launch


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Softmaxes under way, a *slot* for each row and stretch of keys; see ``triton_tiles``.

    Where a peak is -inf no key was seen, the total is 0 and the sums are undefined.
    """

    sums: torch.Tensor  # float32 [slots, num_q_heads, head_dim], weights 2**(score - peak) x values
    peaks: torch.Tensor  # float32 [slots, num_q_heads], in units of log 2
    totals: torch.Tensor  # float32 [slots, num_q_heads], of the weights

    @classmethod
    def allocate(
        cls, slots: int, num_q_heads: int, head_dim: int, device: torch.device
    ) -> "Partials":
        shape = (slots, num_q_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of ``paged_attention``: its arguments, with q's last dimension dense."""

    q: torch.Tensor  # [T, num_q_heads, head_dim]
    k_pool: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], float8 as uint8
    v_pool: torch.Tensor
    k_scales: torch.Tensor | None  # float32 [num_blocks, block_size, num_kv_heads]
    v_scales: torch.Tensor | None
    plan: AttentionPlan
    features: Features

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        plan: AttentionPlan,
        features: Features,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> "Call":
        """Check what the kernels rely on; copies nothing but a q whose last dimension is not dense.

        The pools are of q's type, or int8 or float8_e4m3fn with scales.
        """
        wanted = "on a GPU (or run with TRITON_INTERPRET=1)"
        expect(q.is_cuda or interpreted(), "q", wanted, q)
        if k_pool.dtype in LIMIT:
            like = f"float32 {tuple(k_pool.shape[:3])} contiguous"
            for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
                fits = scales is not None and (
                    scales.dtype == torch.float32
                    and scales.shape == k_pool.shape[:3]
                    and scales.is_contiguous()
                )
                expect(fits, name, like, scales)
        else:
            expect(q.dtype == k_pool.dtype, "q", f"of the pool's {k_pool.dtype}", q)
            expect(k_scales is None and v_scales is None, "scales", "of quantised pools", k_scales)
        return cls(
            q if q.stride(2) == 1 else q.contiguous(),
            stored(k_pool),
            stored(v_pool),
            k_scales,
            v_scales,
            plan,
            features,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.k_pool.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    def arguments(self, launch: Launch) -> dict[str, Any]:
        """Name what the kernels have in common, and the compiler's options."""
        features, plan, q = self.features, self.plan, self.q
        # An unused pointer is never read: any tensor will do.
        return {
            "q": q,
            "k_pool": self.k_pool,
            "v_pool": self.v_pool,
            "k_scales": q if self.k_scales is None else self.k_scales,
            "v_scales": q if self.v_scales is None else self.v_scales,
            "block_tables": plan.block_tables,
            "sinks": q if features.sinks is None else features.sinks.float().contiguous(),
            "slopes": _slopes(features, q),
            "scale": features.scale,
            "soft_cap": features.soft_cap or 1.0,
            "window": features.sliding_window or 0,
            "table_stride": plan.block_tables.stride(0),
            "q_row_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "num_kv_heads": self.num_kv_heads,
            **constants(launch, self.group, plan.block_size, features, self.k_scales is not None),
            "UPCAST": interpreted(),
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": True,
        }


def constants(
    launch: Launch, group: int, block_size: int, features: Features, quantised: bool
) -> dict[str, Any]:
    """Name the values that the kernels are compiled for."""
    return {
        "GROUP": group,
        "HEAD_DIM": launch.head_dim,
        "HEAD_PAD": launch.head_pad,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.block_m,
        "TILE": launch.tile,
        "HAS_WINDOW": features.sliding_window is not None,
        "HAS_SOFT_CAP": features.soft_cap is not None,
        "HAS_SINKS": features.sinks is not None,
        "HAS_SLOPES": features.alibi_slopes is not None,
        "QUANTISED": quantised,
        "UPCAST": False,
    }


def interpreted() -> bool:
    """Whether kernels are interpreted on the CPU, which multiplies bfloat16 wrongly: UPCAST."""
    return bool(triton.knobs.runtime.interpret)


def _slopes(features: Features, q: torch.Tensor) -> torch.Tensor:
    return q if features.alibi_slopes is None else features.alibi_slopes.float().contiguous()
