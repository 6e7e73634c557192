"""A model ready to be served: weights, tokenizer and the few facts that the engine needs of them.

Knows transformers; knows nothing of blocks, requests or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixkv.errors import UnsupportedModel


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

    @classmethod
    def from_model(
        cls, model: Any, tokenizer: Any, *, name: str, path: Path | None = None
    ) -> LoadedModel:
        """Take a model that is already in memory; it stays on its device and in its dtype."""
        config = model.config
        parameter = next(model.parameters())
        return cls(
            model=model.eval(),
            tokenizer=tokenizer,
            name=name,
            path=path,
            dtype=parameter.dtype,
            device=parameter.device,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            max_model_len=_max_model_len(config),
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(config.head_dim),
        )


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for holder in (generation, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)


def _max_model_len(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModel(
        f"{type(config).__name__} names no context length (max_position_embeddings)"
    )
