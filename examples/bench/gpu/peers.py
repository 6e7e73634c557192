"""The attention that others offer on the same keys; each is asked what ours is asked.

A peer that is not installed or refuses is left out, with a line that says why.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from examples.bench.gpu.rows import Sizes
from examples.bench.gpu.timing import Column
from radixkv.kernels.plan import AttentionPlan

Dense = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one set, [seqs, kv heads, kv_len, head_dim] contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """``seqs`` sequences of ``kv_len`` tokens in a pool, the last ``new`` of each asking."""

    seqs: int
    new: int
    kv_len: int
    plan: AttentionPlan
    q: torch.Tensor  # [seqs * new, q heads, head_dim]
    pages: list[Dense]  # of each set: keys and values of the pool [num_blocks, block_size, ...]
    dense: list[Dense]

    @property
    def rows(self) -> torch.Tensor:
        """The queries as the dense peers take them: [seqs, q heads, new, head_dim]."""
        return self.q.view(self.seqs, self.new, *self.q.shape[1:]).transpose(1, 2)


def sdpa(asked: Question) -> Callable[[int], torch.Tensor]:
    """torch's own attention over contiguous keys; its mask is a kind that its fast kernels know."""
    rows = asked.rows
    mask = causal_lower_right(asked.new, asked.kv_len) if asked.new > 1 else None
    return lambda i: scaled_dot_product_attention(
        rows, *asked.dense[i], attn_mask=mask, enable_gqa=True
    )


def peers(asked: Question, sizes: Sizes, notes: list[str]) -> dict[str, Column]:
    """Every peer that answers, once tried on the first set."""
    makers: dict[str, Callable[[Question, Sizes], Column]] = {
        "sdpa": lambda asked, sizes: Column(sdpa(asked)),
        "flex": _flex,
        "flashinfer": _flashinfer,
    }
    found = {}
    for name, make in makers.items():
        if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
            continue
        try:
            column = make(asked, sizes)
            column.call(0)
        except Exception as error:  # whatever a peer raises, the table goes on without it
            notes.append(f"{name} left out: {type(error).__name__}: {str(error).splitlines()[:1]}")
        else:
            found[name] = column
    return found


def _flex(asked: Question, sizes: Sizes) -> Column:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Any = flex_attention
    if not sizes.tiny:
        attend = torch.compile(flex_attention, dynamic=False)
    mask = None
    if asked.new > 1:
        past = asked.kv_len - asked.new

        def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
            return j <= i + past

        device = str(sizes.device)
        mask = create_block_mask(causal, None, None, asked.new, asked.kv_len, device=device)
    rows = asked.rows.contiguous()
    return Column(lambda i: attend(rows, *asked.dense[i], block_mask=mask, enable_gqa=True))


def _flashinfer(asked: Question, sizes: Sizes) -> Column:
    flashinfer: Any = importlib.import_module("flashinfer")

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=sizes.device)
    plan, size = asked.plan, sizes.block_size
    counts = -(-plan.host_kv_lens // size)
    pages = np.concatenate([plan.host_block_tables[s, :n] for s, n in enumerate(counts)])
    last = plan.host_kv_lens - (counts - 1) * size
    ends = np.concatenate([[0], np.cumsum(counts)])

    def put(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(sizes.device)

    keys = (put(ends), put(pages), put(last))
    heads = (sizes.q_heads, sizes.kv_heads, sizes.head_dim, size)
    types = {"q_data_type": sizes.dtype}
    if asked.new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(*keys, *heads, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(put(plan.host_cu_seqlens_q), *keys, *heads, causal=True, **types)
    return Column(lambda i: wrapper.run(asked.q, asked.pages[i]), graph=False)
