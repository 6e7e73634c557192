"""A model ready to be served: weights, tokenizer and the few facts that the engine needs of them.

Knows transformers; knows nothing of blocks, requests or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixkv.service.engine.attention import use_paged_attention
from radixkv.service.engine.probe import refuse_if_inexact
from radixkv.service.engine.support import inspect_model


@dataclass(eq=False)
class LoadedModel:
    """A causal language model and its tokenizer, on one device, in one dtype.

    The model's attention is switched to the paged one, so it answers only through a ModelRunner;
    ``attention.own_attention`` gives it back for a while.
    """

    model: Any
    tokenizer: Any
    name: str
    path: Path | None
    """Where it was loaded from; None when it was built in memory."""
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    max_model_len: int
    """Tokens of context that the model was made for."""
    vocab_size: int
    """Logits a row, at least the tokenizer's size; every sampled id is below it."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    windows: tuple[int | None, ...]
    """The sliding window of each layer."""

    @classmethod
    def from_model(
        cls, model: Any, tokenizer: Any, *, name: str, path: Path | None = None
    ) -> LoadedModel:
        """Take a model that is already in memory; it stays on its device and in its dtype."""
        facts = inspect_model(model)
        use_paged_attention(model.eval())
        loaded = cls(
            model=model,
            tokenizer=tokenizer,
            name=name,
            path=path,
            dtype=model.dtype,
            device=next(model.parameters()).device,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            kv_dtype=facts.kv_dtype,
            windows=facts.windows,
        )
        refuse_if_inexact(loaded)
        return loaded


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for holder in (generation, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)
