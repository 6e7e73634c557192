"""Whether a model can be served exactly, and if not, why; knows configs and one traced forward.

A trace runs two tokens through the model with an attention that computes nothing and takes notes:
which layers ask, with which shapes and keywords, and under which mask rule. Masks are judged as
rules, so a window of 4096 is checked without a prompt of 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from radixkv.errors import UnsupportedModel
from radixkv.service.engine.attention import attention_of

_TRACE = "radixkv-trace"
_TRACE_TOKENS = 2
# Keywords that reach an attention function and do not change what it must compute for packed,
# causal inference. Positions, lengths and flags describe what the plan already knows.
_HARMLESS = {
    "dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "max_length_q", "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k",
    "deterministic",
}  # fmt: skip
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_CHANGING_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine must know of a model to lay out its KV pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    windows: tuple[int | None, ...]
    """The sliding window of each layer."""


@dataclass(slots=True)
class _LayerCall:
    """One call of the attention function, as the trace saw it."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_heads: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    window: int | None
    causal: bool
    extra: tuple[str, ...]
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Trace:
    calls: list[_LayerCall] = field(default_factory=list)


def inspect_model(model: Any) -> ModelFacts:
    """Return a model's facts, or raise UnsupportedModel with the reason.

    Costs a forward pass of two tokens without attention.
    """
    name = type(model).__name__
    if reason := _reason_in_config(model):
        raise UnsupportedModel(f"{name} cannot be served: {reason}")
    trace, vocab_size = _trace(model)
    limit = _max_model_len(model.config)
    if reason := _reason_in_trace(trace, model.config, limit):
        raise UnsupportedModel(f"{name} cannot be served: {reason}")
    calls = sorted(trace.calls, key=lambda call: call.layer)
    return ModelFacts(
        num_layers=len(calls),
        num_kv_heads=calls[0].kv_heads,
        head_dim=calls[0].head_dim,
        kv_dtype=calls[0].kv_dtype,
        vocab_size=vocab_size,
        max_model_len=limit,
        windows=tuple(call.window for call in calls),
    )


def _reason_in_config(model: Any) -> str | None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose answers depend on more than a prefix of tokens"
    if config.get_text_config() is not config or _modalities(model) - {"text"}:
        return "it takes more than text, and only text is part of the cache's identity"
    if model.get_output_embeddings() is None or not model.can_generate():
        return "it has no language-model head (wanted a ...ForCausalLM)"
    if getattr(model, "_is_stateful", False):
        return "it has recurrent layers, whose state is not kept as keys and values"
    if odd := set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS:
        return f"it has layers of type {', '.join(sorted(odd))}; served: full and sliding attention"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    ):
        return "its attention is not causal, so a prefix depends on what follows it"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced through transformers' AttentionInterface"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "it carries adapters that can be switched while it runs; merge them first"
    if len({p.device for p in model.parameters()}) != 1:
        return "its weights are spread over several devices"
    return None


def _modalities(model: Any) -> set[str]:
    # Asked of the decoder itself: a text model inherits its family's modalities as the outer class.
    found = getattr(model.base_model, "input_modalities", None) or ("text",)
    return {found} if isinstance(found, str) else set(found)


def _max_model_len(config: Any) -> int:
    """Tokens of context for which a position's key never depends on the prompt's length."""
    known = [
        value
        for name in ("max_position_embeddings", "n_positions", "max_seq_len")
        if isinstance(value := getattr(config, name, None), int) and value > 0
    ]
    if not known:
        raise UnsupportedModel(
            f"{type(config).__name__} names no context length (max_position_embeddings)"
        )
    limit = known[0]
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _CHANGING_ROPE:
            # Past this length these kinds of rope turn earlier keys too, and cached ones are wrong.
            key = "original_max_position_embeddings"
            limit = min(limit, int(rope.get(key) or getattr(config, key, None) or limit))
    return limit


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _trace(model: Any) -> tuple[_Trace, int]:
    trace = _Trace()
    name = type(model).__name__
    device = next(model.parameters()).device
    with torch.inference_mode(), attention_of(model, _TRACE):
        try:
            output = model(
                input_ids=torch.arange(_TRACE_TOKENS, device=device).unsqueeze(0),
                position_ids=torch.arange(_TRACE_TOKENS, device=device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor([_TRACE_TOKENS - 1], device=device),
                radixkv=trace,
            )
            shape = tuple(output.logits.shape)
        except Exception as e:  # whatever a foreign model raises, the answer is the same
            raise UnsupportedModel(
                f"{name} cannot be served: a forward pass through the attention interface failed "
                f"with {type(e).__name__}: {e}"
            ) from e
    if len(shape) != 3 or shape[1] != 1:
        raise UnsupportedModel(
            f"{name} cannot be served: asked for the logits of one row, its forward gave {shape}"
        )
    return trace, shape[2]


def _reason_in_trace(trace: _Trace, config: Any, limit: int) -> str | None:
    calls = trace.calls
    layers = [call.layer for call in calls]
    if not calls:
        return "none of its layers asks the attention interface"
    if len(set(layers)) < len(layers):
        return "a layer attends more than once, or layers share their keys and values"
    if sorted(layers) != list(range(len(layers))) or len(layers) != config.num_hidden_layers:
        return (
            f"only layers {sorted(layers)} of {config.num_hidden_layers} attend; the others keep "
            "a state of their own, or share keys and values"
        )
    if len({(c.kv_heads, c.head_dim, c.kv_dtype) for c in calls}) > 1:
        return "its layers differ in the number or size of their key heads"
    first = calls[0]
    if first.head_dim != first.value_dim:
        return (
            f"its keys have {first.head_dim} and its values {first.value_dim} numbers a head "
            "(latent attention), which the pool does not store"
        )
    if first.query_heads % first.kv_heads or first.query_dtype != first.kv_dtype:
        return "its query heads do not match its key heads in number or dtype"
    if extra := sorted({name for call in calls for name in call.extra}):
        return f"its attention takes {', '.join(extra)}, which paged attention does not know"
    if not all(call.causal for call in calls):
        return "its attention is not causal, so a prefix depends on what follows it"
    judged: dict[tuple[int, int | None], bool] = {}
    for call in calls:
        key = (id(call.mask), call.window)
        if key not in judged:
            judged[key] = _mask_is_window(call.mask, call.window, limit)
        if not judged[key]:
            window = "no window" if call.window is None else f"a window of {call.window}"
            return f"the mask of layer {call.layer} is not a causal one with {window}"
    return None


def _mask_is_window(mask: torch.Tensor | None, window: int | None, limit: int) -> bool:
    """Whether a mask's rule lets position q see exactly the keys max(0, q - window + 1) .. q."""
    if mask is None:  # the model makes no masks, so nothing but its keyword can be a window
        return True
    rule: Callable[..., torch.Tensor] | None = getattr(mask, "rule", None)
    if rule is None:  # sliced or rebuilt by the model: only its values are left to judge
        return window is None and bool(mask.tril().eq(mask).all())
    edges = (0, 1) if window is None else (0, 1, window - 1, window, window + 1, 3 * window)
    for q in {q for q in (*edges, limit // 2, limit - 1) if 0 <= q < limit}:
        keys = torch.arange(q + 2)
        first = 0 if window is None else max(0, q - window + 1)
        wanted = (keys >= first) & (keys <= q)
        zero = torch.tensor(0)
        if not torch.equal(rule(zero, zero, torch.tensor(q), keys).expand(q + 2), wanted):
            return False
    return True


def _note_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    radixkv: _Trace | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Note a call of the attention function; answer zeros of the right shape."""
    if radixkv is None:
        raise TypeError("the model's forward does not hand keywords on to its attention")
    is_causal = kwargs.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    radixkv.calls.append(
        _LayerCall(
            layer=module.layer_idx,  # type: ignore[arg-type]
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            query_heads=query.shape[1],
            query_dtype=query.dtype,
            kv_dtype=key.dtype,
            window=kwargs.get("sliding_window"),
            causal=bool(causal),
            extra=tuple(
                name
                for name, given in kwargs.items()
                if name not in _HARMLESS and given is not None and given is not False
            ),
            mask=attention_mask,
        )
    )
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[3]), None


def _note_mask(**kwargs: Any) -> torch.Tensor:
    """Make a mask that remembers the rule it was made from."""
    mask = sdpa_mask(**(kwargs | {"allow_is_causal_skip": False}))
    assert mask is not None, "a mask that may not be skipped was skipped"
    mask.rule = kwargs["mask_function"]  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(_TRACE, _note_call)
AttentionMaskInterface.register(_TRACE, _note_mask)
