"""The ledger: bytes a token, blocks and tails, by figures that papers and models give."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidConfig
from radixkv.ledger import blocks_of, kv_bytes_per_token, ledger_of, tail_of, weight_bytes

OPT_13B = {
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}
MHA_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "torch_dtype": "float16",
}
LLAMA2_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
}


def test_opt_13b_takes_800_kib_a_token() -> None:
    assert kv_bytes_per_token(OPT_13B) == 819_200
    assert ledger_of(OPT_13B).sequence_bytes(2048) == 1_677_721_600


def test_a_7b_model_with_full_heads_takes_512_kib_a_token() -> None:
    assert kv_bytes_per_token(MHA_7B) == 524_288
    tail = tail_of(40, 16)
    assert (tail.blocks, tail.tail_tokens, tail.wasted_slots) == (3, 8, 8)


def test_llama_2_70b_shares_heads_and_takes_320_kib_a_token() -> None:
    assert kv_bytes_per_token(LLAMA2_70B) == 327_680
    assert ledger_of(LLAMA2_70B).kind == "GQA"
    tail = tail_of(1000, 16)
    assert (tail.blocks, tail.full_blocks, tail.full_blocks * 16) == (63, 62, 992)
    assert tail.tail_tokens == 8  # half of the last block


def test_mla_keeps_one_latent_and_one_rotated_part_for_all_heads() -> None:
    ledger = ledger_of(DEEPSEEK_V3)
    assert ledger.kind == "MLA"
    assert ledger.bytes_per_token == 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("dtype", "part"),
    [("float32", 2.0), ("bfloat16", 1.0), ("fp8_e4m3", 0.5), ("int8", 0.5)],
)
def test_the_cache_may_have_another_precision(dtype: str, part: float) -> None:
    assert kv_bytes_per_token(LLAMA2_70B, dtype) == 327_680 * part


def test_one_head_for_all_is_multi_query() -> None:
    config = {**MHA_7B, "multi_query": True}
    assert ledger_of(config).kind == "MQA"
    assert kv_bytes_per_token(config) == 524_288 // 32


def test_layers_with_a_window_stop_growing() -> None:
    config = {
        **MHA_7B,
        "num_hidden_layers": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    ledger = ledger_of(config)
    assert [layer.window for layer in ledger.layers] == [128, None, 128, None]
    each = ledger.bytes_per_token // 4
    assert ledger.sequence_bytes(1000) == each * (2 * 1000 + 2 * 128)
    assert ledger.sequence_bytes(100) == ledger.bytes_per_token * 100


def test_linear_attention_keeps_no_keys() -> None:
    config = {**MHA_7B, "num_hidden_layers": 2}
    config["layer_types"] = ["linear_attention", "full_attention"]
    assert ledger_of(config).sequence_bytes(500) == kv_bytes_per_token(config) // 2 * 500


def test_a_window_that_is_switched_off_is_none() -> None:
    config = {**MHA_7B, "sliding_window": 128, "use_sliding_window": False}
    assert {layer.window for layer in ledger_of(config).layers} == {None}


def test_the_language_part_of_a_larger_config_is_read() -> None:
    assert kv_bytes_per_token({"text_config": LLAMA2_70B, "dtype": "bfloat16"}) == 327_680


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"torch_dtype": "int3"}, "int3"),
    ],
)
def test_what_is_missing_or_wrong_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        kv_bytes_per_token({**MHA_7B, **change})


def test_weights_are_estimated_within_some_per_cent() -> None:
    estimated = weight_bytes(LLAMA2_70B)
    assert estimated is not None and abs(estimated / (68.98e9 * 2) - 1) < 0.01
    estimated = weight_bytes(OPT_13B)
    assert estimated is not None and abs(estimated / (12.85e9 * 2) - 1) < 0.02
    assert weight_bytes(DEEPSEEK_V3) is None  # its config does not say enough


@given(st.integers(1, 10_000), st.integers(1, 256))
def test_waste_is_less_than_a_block(num_tokens: int, block_size: int) -> None:
    tail = tail_of(num_tokens, block_size)
    assert tail.blocks == blocks_of(num_tokens, block_size)
    assert 0 <= tail.wasted_slots < block_size
    assert tail.blocks * block_size - tail.wasted_slots == num_tokens


def test_the_served_small_model_is_as_its_config_says() -> None:
    config = json.loads('{"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,'
                        '"num_key_value_heads": 3, "dtype": "bfloat16"}')  # fmt: skip
    assert kv_bytes_per_token(config, "float32") == 2 * 30 * 3 * 64 * 4
