"""What a model's config.json alone says against some settings, before seconds go into its weights.

Knows config.json and arithmetic, nothing of torch. It refuses only what is refused later anyway,
with the same words; whatever the file does not say plainly is left to the loaded model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.config import EngineConfig
from radixkv.errors import InvalidConfig
from radixkv.service.engine.capacity import Capacity

NATIVE_FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""What the compiled decoder knows."""


def check_settings(path: Path, config: EngineConfig) -> None:
    """Raise InvalidConfig if the model in ``path`` can never be served under ``config``."""
    try:
        about = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # the loader says what is wrong with it
    if not isinstance(about, dict):
        return
    if config.deterministic or config.decoder == "native":
        _expect_native(about, config)
    model_len = about.get("max_position_embeddings")
    if not isinstance(model_len, int):
        return
    Capacity.plan(
        kv_memory=config.kv_memory,
        bytes_per_block=config.block_size * _least_bytes_per_token(about, config),
        block_size=config.block_size,
        model_len=model_len,
        max_model_len=config.max_model_len,
    )


def _expect_native(about: Mapping[str, Any], config: EngineConfig) -> None:
    asked = "deterministic is on" if config.deterministic else "decoder is 'native'"
    names = [name for name in about.get("architectures") or () if isinstance(name, str)]
    if names and not set(names) & set(NATIVE_FAMILIES):
        reason = f"{names[0]} is not one of {', '.join(NATIVE_FAMILIES)}"
    elif config.device.startswith("cuda"):
        reason = f"it runs on the CPU, and device is {config.device!r}"
    else:
        return
    raise InvalidConfig(f"{asked}, which needs the compiled decoder, and it cannot be: {reason}")


def _least_bytes_per_token(about: Mapping[str, Any], config: EngineConfig) -> int:
    """Bytes of KV a token; at least 1, and never more than the loaded model will need."""
    heads = about.get("num_attention_heads")
    kv_heads = about.get("num_key_value_heads")
    head_dim = about.get("head_dim")
    if not head_dim and isinstance(about.get("hidden_size"), int) and isinstance(heads, int):
        head_dim = about["hidden_size"] // max(heads, 1)
    parts = (about.get("num_hidden_layers"), kv_heads, head_dim)
    known = [part for part in parts if isinstance(part, int) and part > 0]
    if len(known) < len(parts):
        return 1
    if config.kv_dtype != "auto":
        return 2 * math.prod(known[:2]) * (known[2] + 4)  # a scale of 4 bytes a head
    return 2 * math.prod(known) * (4 if config.dtype == "float32" else 2)
