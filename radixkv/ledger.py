"""What the KV of a model costs: bytes a token, blocks, and how many sequences fit a memory.

Reads a model's config (the mapping of its ``config.json``); knows no weights and no tensors. Full
attention, grouped and multi-query heads, sliding windows, and the latent form of MLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidConfig

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8": 1,
    "int8": 1,
}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values."""

    bytes_per_token: int
    window: int | None
    """Tokens that it ever looks back on, None for all: what lies before may be freed."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The KV of one model in one precision."""

    layers: tuple[LayerKV, ...]
    dtype: str
    kind: str
    """``MHA``, ``GQA``, ``MQA`` or ``MLA``."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, while it is inside every window."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of ``block_size`` tokens in all layers."""
        return block_size * self.bytes_per_token

    def sequence_bytes(self, num_tokens: int, block_size: int = 1) -> int:
        """Bytes of a sequence whose KV behind a layer's window is freed, block by block."""
        total = 0
        for layer in self.layers:
            kept = num_tokens if layer.window is None else min(num_tokens, layer.window)
            # A window that does not begin on a block's border needs one block more.
            spare = block_size if kept < num_tokens and block_size > 1 else 0
            total += layer.bytes_per_token * (blocks_of(kept, block_size) * block_size + spare)
        return total


@dataclass(frozen=True, slots=True)
class Tail:
    """How a sequence fills its blocks."""

    blocks: int
    full_blocks: int
    tail_tokens: int
    """Tokens in the last block if that is not full, else 0."""
    wasted_slots: int


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


def tail_of(num_tokens: int, block_size: int) -> Tail:
    """Say how ``num_tokens`` lie in blocks."""
    blocks, full = blocks_of(num_tokens, block_size), num_tokens // block_size
    return Tail(blocks, full, num_tokens - full * block_size, blocks * block_size - num_tokens)


def kv_bytes_per_token(config: Mapping[str, Any], kv_dtype: str | None = None) -> int:
    """Bytes of KV that one token takes in all layers of the model that ``config`` describes.

    ``kv_dtype`` is the config's own where None. Raises InvalidConfig naming what is missing.
    """
    return ledger_of(config, kv_dtype).bytes_per_token


def ledger_of(config: Mapping[str, Any], kv_dtype: str | None = None) -> Ledger:
    """Read the ledger off a model's config; raises InvalidConfig naming what is missing."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"dtype": config.get("dtype") or config.get("torch_dtype"), **text}
    dtype = str(kv_dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InvalidConfig(f"kv dtype is {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    num_layers = _whole(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _whole(config, "num_attention_heads", "n_head", "n_heads")
    if config.get("kv_lora_rank"):
        values = _whole(config, "kv_lora_rank") + _whole(config, "qk_rope_head_dim")
        kind = "MLA"
    else:
        kv_heads = _kv_heads(config, heads)
        head_dim = config.get("head_dim") or config.get("attention_head_dim")
        if not head_dim:
            hidden = _whole(config, "hidden_size", "n_embd", "d_model")
            head_dim = hidden // heads
        values = 2 * kv_heads * int(head_dim)
        kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    each = values * DTYPE_BYTES[dtype]
    windows = _windows(config, num_layers)
    return Ledger(tuple(LayerKV(each, window) for window in windows), dtype, kind)


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    given = config.get("num_key_value_heads")
    if given is None:
        given = config.get("num_kv_heads") or config.get("n_head_kv")
    if given is None:
        given = 1 if config.get("multi_query") else heads
    if not isinstance(given, int) or not 0 < given <= heads or heads % given:
        raise InvalidConfig(
            f"num_key_value_heads is {given!r}; wanted a divisor of the {heads} attention heads"
        )
    return given


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The window of each layer. Layers of a kind that keeps no KV (linear attention) have 0."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        of_kind = {"full_attention": None, "sliding_attention": window, "chunked_attention": window}
        return [of_kind.get(kind, 0) for kind in kinds]
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return [None] * num_layers
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:  # the last of each group looks at everything
        return [None if (i + 1) % pattern == 0 else window for i in range(num_layers)]
    first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
    return [window if i >= (first or 0) else None for i in range(num_layers)]


def weight_bytes(config: Mapping[str, Any]) -> int | None:
    """Estimate the bytes of the weights; None where the config does not say enough.

    Exact to a few per cent for decoders with gated or plain feed-forward layers, dense or with
    experts: norms and biases are left out.
    """
    try:
        layers = _whole(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        hidden = _whole(config, "hidden_size", "n_embd", "d_model")
        heads = _whole(config, "num_attention_heads", "n_head", "n_heads")
        vocab = _whole(config, "vocab_size")
        inner = _whole(config, "intermediate_size", "ffn_dim", "n_inner")
    except InvalidConfig:
        return None
    if config.get("kv_lora_rank"):
        return None
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head_dim * (heads + _kv_heads(config, heads))
    gated = "intermediate_size" in config
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    feed_forward = (3 if gated else 2) * hidden * inner * int(experts)
    tied = config.get("tie_word_embeddings", not gated)
    params = layers * (attention + feed_forward) + vocab * hidden * (1 if tied else 2)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return params * DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)


def _whole(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise InvalidConfig(f"the config has no {' or '.join(names)}, which says how large its KV is")
