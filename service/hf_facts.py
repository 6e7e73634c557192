"""What a transformers model's own cache is made of, and whether it can be cut at any token.

Knows configs and three short forward passes; nothing of blocks or identities. Whatever keeps more
than keys and values of single tokens is refused by name, and what claims to keep no more is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from radixkv.errors import UnsupportedModel
from radixkv.service.hf_layers import fill

_CHANGING_ROPE = {"dynamic", "longrope"}
_FEW, _MANY = 8, 64
# Greatest difference of logits, relative to the greatest logit, that rounding may explain.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer keeps of each token; ``window`` as the layer's cache names it."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the prefix cache must know of a model."""

    layers: tuple[LayerFacts | None, ...]
    """By layer; None where a layer keeps nothing, or reads what another keeps."""
    keyword: str
    """The forward's keyword for a cache, which has changed its name between versions."""
    parameters: tuple[str, ...]
    """The names of the forward's parameters in order."""
    limit: int | None
    """Tokens for which no key depends on the length of the whole; None if that has no end."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.token_bytes for layer in self.layers if layer is not None)


def inspect_cache(model: Any) -> CacheFacts:
    """Return the facts, or raise UnsupportedModel with the reason.

    Costs three forward passes of at most 64 tokens.
    """
    name = type(model).__name__
    if reason := _reason_in_config(model):
        raise UnsupportedModel(f"{name} cannot use a prefix cache: {reason}")
    parameters = tuple(inspect.signature(model.forward).parameters)
    keyword = next((k for k in ("cache", "past_key_values") if k in parameters), None)
    if keyword is None or "input_ids" not in parameters:
        raise UnsupportedModel(
            f"{name} cannot use a prefix cache: its forward takes no input_ids, or no cache"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            layers = _try(model, keyword)
    except UnsupportedModel as e:
        raise UnsupportedModel(f"{name} cannot use a prefix cache: {e}") from None
    except Exception as e:  # whatever a foreign model raises, the answer is the same
        raise UnsupportedModel(
            f"{name} cannot use a prefix cache: a forward pass with a DynamicCache failed with "
            f"{type(e).__name__}: {e}"
        ) from e
    finally:
        model.train(training)
    return CacheFacts(layers, keyword, parameters, _limit(model.config))


def _reason_in_config(model: Any) -> str | None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", 0):
        return "it attends to an encoder, so its keys depend on more than a prefix of tokens"
    if getattr(model, "_is_stateful", False):
        return "it has recurrent layers, whose state cannot be cut at a token"
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        return "its attention is not causal, so a prefix depends on what follows it"
    if reason := adapters_of(model):
        return reason
    if any(p.device.type == "meta" for p in model.parameters()):
        return "some of its weights are not in memory"
    return None


def adapters_of(model: Any) -> str | None:
    """Return why a model's adapters are in the way; None if it carries none. O(1)."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return "it carries adapters that can be switched while it runs; merge them first"
    return None


def _limit(config: Any) -> int | None:
    """Return how long a sequence may be before its rope turns earlier keys too."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = []
    for kind in kinds:
        if (kind.get("rope_type") or kind.get("type")) in _CHANGING_ROPE:
            key = "original_max_position_embeddings"
            given = kind.get(key) or getattr(text, key, None)
            limits.append(int(given or text.max_position_embeddings))
    return min(limits, default=None)


def _try(model: Any, keyword: str) -> tuple[LayerFacts | None, ...]:
    """Take the facts from a run in one piece; compare it with one that begins from its KV."""
    cache = DynamicCache(config=model.config)
    _check_kinds(cache.layers)
    windows = [x.sliding_window for x in cache.layers if type(x) is DynamicSlidingWindowLayer]
    length = min(_MANY, min(windows) + _FEW) if windows else _FEW
    num_tokens = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(length, device=model.device) * 7 + 3).remainder(num_tokens)[None]
    whole = model(input_ids=ids, **{keyword: cache}).logits
    facts = [_facts(layer) for layer in cache.layers]
    if not any(facts):
        raise UnsupportedModel("none of its layers kept keys and values")

    at = length - 3
    part, rest = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(input_ids=ids[:, :at], **{keyword: part})
    sources: Sequence[Any] = part.layers
    for source, target in zip(sources, rest.layers, strict=True):
        if source.keys is not None:
            fill(target, source.keys.clone(), source.values.clone(), at)
    split = model(input_ids=ids[:, at:], **{keyword: rest}).logits
    wanted = whole[:, at:].float()
    off = (split.float() - wanted).abs().max().item()
    allowed = _TOLERANCE.get(whole.dtype, _COARSE_TOLERANCE) * wanted.abs().max().item()
    if not off <= allowed:
        raise UnsupportedModel(
            f"begun from the keys and values of its first {at} tokens, its logits were off by "
            f"{off:.3g} (at most {allowed:.3g} is rounding): it keeps more than those"
        )
    return tuple(facts)


def _check_kinds(layers: Sequence[Any]) -> None:
    # A layer that keeps nothing is younger than the oldest transformers that we take.
    known = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", None))
    for index, layer in enumerate(layers):
        if type(layer) not in known:
            raise UnsupportedModel(
                f"layer {index} keeps a {type(layer).__name__}, which cannot be cut at a token "
                "(served: full attention, sliding windows, and both together)"
            )


def _facts(layer: Any) -> LayerFacts | None:
    keys, values = layer.keys, layer.values
    if keys is None:
        return None
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        raise UnsupportedModel(
            f"it keeps keys of shape {tuple(keys.shape)} and values of {tuple(values.shape)}"
        )
    window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
    return LayerFacts(
        keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device, window
    )
