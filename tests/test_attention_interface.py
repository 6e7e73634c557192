"""Which models are served, which are refused and why, and who may call the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from radixkv.errors import UnsupportedModel
from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.loading import LoadedModel
from tests.tiny_models import build, build_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _build(kind: str, **fields: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**(_COMMON | fields))
        auto: Any = AutoModelForCausalLM
        return auto.from_config(config).eval()


def _load(model: Any) -> LoadedModel:
    return LoadedModel.from_model(model, build_tokenizer(), name="test")


@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("gpt2", {}, (None,) * 4),
        ("gpt_neox", {}, (None,) * 4),
        ("phi3", {"sliding_window": 20, "original_max_position_embeddings": 512}, (20,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
         (None, None, 16, 16)),
        ("gemma2", {"sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 16},
         (16, None, 16, None)),
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 16, "head_dim": 16, **_MOE},
         (16, None, 16, None)),
        ("qwen3_moe", {"num_experts": 4, "head_dim": 16, **_MOE}, (None,) * 4),
        ("cohere2", {"sliding_window": 16}, (16, 16, 16, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_families_beyond_the_named_ones_pass_the_probe(
    kind: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """Learned positions, partial rope, soft caps, attention sinks, experts, parallel layers."""
    assert _load(_build(kind, **fields)).windows == windows


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("mamba", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("minimax", {}, "linear_attention"),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **_MOE,
                         "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                         "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8},
         "latent attention"),
        ("diffllama", {}, "attends more than once"),
        ("gemma4_text", {"sliding_window": 16, "vocab_size_per_layer_input": 320},
         "number or size of their key heads"),
        ("bloom", {}, "AttentionInterface"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    kind: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        _load(_build(kind, **fields))


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=320, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        _load(T5ForConditionalGeneration(config))


def test_a_model_without_a_language_model_head_is_refused() -> None:
    headless: Any = LlamaForSequenceClassification
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        _load(headless(build("llama")[0].config))


def test_a_window_that_only_the_mask_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask's rule is judged far beyond the probe's few tokens: here at a window of 3,000."""
    model, _ = build("mistral", sliding_window=3000)
    _load(model)
    model, _ = build("mistral", sliding_window=3000)
    inner = model.model.layers[1].self_attn
    own = LlamaAttention.forward  # the same attention without the keyword
    monkeypatch.setattr(inner, "forward", own.__get__(inner))
    with pytest.raises(UnsupportedModel, match="mask of layer 1"):
        _load(model)


def test_a_state_carried_between_tokens_is_caught_by_the_probe() -> None:
    """A convolution over the packed tokens is in no config, and mixes what must not mix."""
    model, _ = build("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    before = model(torch.arange(9)[None]).logits
    with pytest.raises(UnsupportedModel, match="cannot be served exactly"):
        _load(model)
    assert torch.equal(model(torch.arange(9)[None]).logits, before)  # refused, and left as it was


def test_a_rope_that_turns_with_the_length_serves_only_the_length_before_it() -> None:
    """Keys in the cache must not depend on how long a later prompt is."""
    model, _ = build(
        "llama",
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 1024,
        },
    )  # fmt: skip
    assert _load(model).max_model_len == 1024
    assert _load(build("llama")[0]).max_model_len == 4096


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model, _ = build("llama", vocab_size=300)
    with pytest.raises(UnsupportedModel, match="do not belong together"):
        _load(model)


def test_a_served_model_answers_by_itself_only_when_given_its_attention_back() -> None:
    model, tokenizer = build("gemma3")
    ids = torch.tensor([tokenizer("the cat sat in the house " * 3).input_ids])
    wanted = model(ids).logits
    _load(model)
    with pytest.raises(RuntimeError, match="own_attention"):
        model(ids)
    with own_attention(model):
        torch.testing.assert_close(model(ids).logits, wanted)
    with pytest.raises(RuntimeError, match="own_attention"):
        model(ids)


def test_loading_leaves_the_generators_alone() -> None:
    model, _ = build("llama")
    before = torch.random.get_rng_state()
    _load(model)
    assert torch.equal(torch.random.get_rng_state(), before)
