"""Small random models and a small real tokenizer, built in memory from a seed: no files.

Each model has the architecture of its family in full (grouped heads, rope, norms, windows), so what
holds for it holds for the family; its answers mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = (
    "t h,th e,i n,a n,r e,o n,e r,Ġ t,Ġ a,Ġ s,Ġ w,Ġ o,Ġ c,Ġt he,an d,in g,Ġ and,e n,o u,i s,"
    "e s,o r,a t,e d,i t,l l,Ġ is,Ġ in,Ġ to,Ġ of,t o,o f,Ġy ou,Ġ y,h e,l o,ll o,he llo,Ġ b,Ġ m,"
    "Ġ f,u s,er s,us er,a s,s t,as s,ass is,assis t,an t,assist ant,s y,sy st,e m,syst em"
)


def build_tokenizer(*, add_bos: bool = False) -> Any:
    """Build a byte-level BPE tokenizer of about 310 tokens: any text goes there and back.

    Ids 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|> (eos), as in SmolLM2. ``add_bos`` makes
    plain tokenization begin with <|endoftext|>, and the chat template write one too.
    """
    vocab: dict[str, int] = {}
    for token in (*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocab[token] = len(vocab)
    merges = []
    for pair in _MERGES.split(","):
        left, right = pair.split(" ")
        if left in vocab and right in vocab and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token="<|endoftext|>" if add_bos else None,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = ("{{ bos_token }}" if add_bos else "") + CHAT_TEMPLATE
    return tokenizer


def build(
    arch: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> tuple[Any, Any]:
    """Build (model, tokenizer); ``overrides`` are fields of the architecture's config.

    Weights are drawn wide enough that likeliest tokens stand apart, and the global generator of
    torch is left as it was.
    """
    tokenizer = build_tokenizer()
    config_class, model_class, special = _FAMILIES[arch]
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 2,
    }
    config = config_class(**(fields | special | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(dtype).eval(), tokenizer


# Windows are shorter than the tests' prompts, so that every test crosses them.
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
        },
    ),
}
