"""Recognises Llama-like models of transformers and hands their weights to the compiled decoder.

Knows transformers' names for the parts of such a model; nothing of how they are computed. A model
that is in any way unlike what the decoder computes is left to the generic path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from radixkv.kernels.native import unavailable_reason
from radixkv.kernels.native_decoder import DecoderLayer, DecoderWeights, NativeDecoder
from radixkv.kernels.packing import Arena, PackedLinear, pack, pack_gated
from radixkv.service.engine.preflight import NATIVE_FAMILIES

FAMILIES = NATIVE_FAMILIES
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""
_LINEAR = {"Linear", "FewRowsLinear", "ProjectionPart"}
_LANES = 16  # the widest vectors; a head must be whole ones


def reason_against(model: Any) -> str | None:
    """Say why the compiled decoder cannot run ``model``; None if it can."""
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith(
        "transformers."
    ):
        return f"{type(model).__name__} is not one of {', '.join(FAMILIES)}"
    config, parameter = model.config, next(model.parameters())
    if parameter.device.type != "cpu":
        return "it is not on the CPU"
    if reason := unavailable_reason():
        return reason
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {parameter.dtype}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _STATIC_ROPE:
        return f"its rotary embedding is {rope.get('rope_type')}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of its heads is rotated"
    attention = model.model.layers[0].self_attn
    if attention.head_dim % _LANES:
        return f"its heads have {attention.head_dim} numbers; wanted a multiple of {_LANES}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'it'} has a forward hook"
    kinds = {re.sub(r"\d+", "N", name) for name, _ in model.named_parameters()}
    if odd := sorted(kinds - _known_parameters(type(model).__name__)):
        return f"it has parameters beyond its family's: {', '.join(odd)}"
    odd_layers = {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} - _LINEAR
    return f"it has layers of type {', '.join(sorted(odd_layers))}" if odd_layers else None


def _known_parameters(family: str) -> set[str]:
    layer = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    for group, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for name in names:
            layer |= {f"{group}.{name}_proj.weight", f"{group}.{name}_proj.bias"}
    if family == "Qwen3ForCausalLM":
        layer |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    whole = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.bias"}
    return whole | {f"model.layers.N.{name}" for name in layer}


def build_decoder(model: Any, windows: Sequence[int | None], max_positions: int) -> NativeDecoder:
    """Pack the weights of a model that ``reason_against`` has nothing against; about 1 GB/s.

    windows        the sliding window of each layer
    max_positions  tokens of context that will be asked for at most
    """
    arena, config = Arena(), model.config
    inner, first = model.model, model.model.layers[0].self_attn
    embeddings = inner.embed_tokens.weight.detach()
    head = pack(model.lm_head.weight, model.lm_head.bias, arena=arena)
    layers = [
        _layer(layer, window, arena) for layer, window in zip(inner.layers, windows, strict=True)
    ]
    cosines, sines = _angles(inner.rotary_emb, max_positions, embeddings.device)
    return NativeDecoder(
        DecoderWeights(
            layers=layers,
            embeddings=embeddings,
            norm=_norm(inner.norm),
            head=head,
            cosines=cosines,
            sines=sines,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            epsilon=config.rms_norm_eps,
            scale=first.scaling,
        )
    )


def _layer(layer: Any, window: int | None, arena: Arena) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight = torch.cat([p.weight.detach() for p in projections])
    biases = [p.bias.detach() for p in projections if p.bias is not None]
    gate_up = _gated(mlp, arena)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return DecoderLayer(
        qkv=pack(weight, torch.cat(biases) if biases else None, arena=arena),
        out=pack(attention.o_proj.weight.detach(), attention.o_proj.bias, arena=arena),
        gate_up=gate_up,
        down=pack(
            mlp.down_proj.weight.detach(),
            mlp.down_proj.bias,
            arena=arena,
            in_features=gate_up.out_features // 2,
        ),
        before=_norm(layer.input_layernorm),
        after=_norm(layer.post_attention_layernorm),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
        window=window,
    )


def _gated(mlp: Any, arena: Arena) -> PackedLinear:
    biases = None if mlp.gate_proj.bias is None else (mlp.gate_proj.bias, mlp.up_proj.bias)
    return pack_gated(
        mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), biases, arena=arena
    )


def _norm(module: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().float().contiguous()


@torch.inference_mode()
def _angles(
    rotary: Any, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ask the model's own module for cosines and sines of every position, [positions, dim / 2]."""
    positions = torch.arange(num_positions, device=device).unsqueeze(0)
    cosines, sines = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = cosines.shape[-1] // 2  # transformers repeats them for both halves of a head
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()
