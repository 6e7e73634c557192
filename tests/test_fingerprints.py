"""Fingerprints change with whatever changes a model's KV, and with nothing else."""

from __future__ import annotations

import torch

from radixkv.service.engine.fingerprints import (
    Fingerprints,
    digest_config,
    digest_template,
    digest_tokenizer,
    digest_weights,
)
from tests.tiny_models import ARCHITECTURES, build, build_tokenizer


def _of(arch: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> Fingerprints:
    model, tokenizer = build(arch, seed=seed, dtype=dtype)
    return Fingerprints.of(model, tokenizer, dtype, (None, 16))


def test_two_builds_of_one_model_agree() -> None:
    assert _of() == _of()


def test_models_differ_where_they_differ() -> None:
    base = _of()
    other = _of(seed=1)
    assert other.weights != base.weights and other.config == base.config
    assert len({_of(arch).config for arch in ARCHITECTURES}) == len(ARCHITECTURES)
    assert _of(dtype=torch.bfloat16).execution.compute_dtype == "bfloat16"
    assert base.execution.sliding_window == 16


def test_a_weights_digest_sees_bytes_names_shapes_and_dtypes() -> None:
    """IDENTITY-2: a name is no identity; one bit of one weight is."""
    x = torch.arange(6, dtype=torch.float32)
    base = digest_weights({"a": x, "b": x + 1})
    assert digest_weights({"b": x + 1, "a": x.clone()}) == base
    flipped = x.clone()
    flipped.view(torch.int32)[5] ^= 1
    for other in (
        {"a": flipped, "b": x + 1},
        {"a": x + 1, "b": x},
        {"a": x.view(2, 3), "b": x + 1},
        {"a": x.to(torch.bfloat16), "b": x + 1},
        {"a": x.view(torch.int32), "b": x + 1},
        {"a": x},
    ):
        assert digest_weights(other) != base


def test_a_weights_digest_takes_any_layout() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert digest_weights({"a": x.t().contiguous().t()}) == digest_weights({"a": x})
    assert digest_weights({"a": torch.tensor(3.0)}) != digest_weights({"a": torch.tensor(4.0)})
    assert digest_weights({"a": torch.empty(0)}) == digest_weights({"a": torch.empty(0)})


def test_a_config_digest_leaves_out_places_and_output_switches() -> None:
    config = {"rope_theta": 1e4, "layers": [1, 2]}
    base = digest_config(config)
    assert digest_config(config | {"_name_or_path": "x", "use_cache": False}) == base
    assert digest_config(config | {"rope_theta": 1e5}) != base


def test_a_tokenizer_digest_sees_rules_and_special_tokens() -> None:
    base = digest_tokenizer(build_tokenizer())
    assert digest_tokenizer(build_tokenizer()) == base
    assert digest_tokenizer(build_tokenizer(add_bos=True)) != base
    longer = build_tokenizer()
    longer.add_tokens(["neologism"])
    assert digest_tokenizer(longer) != base


def test_a_template_digest_sees_every_character() -> None:
    assert digest_template(None) is None
    assert digest_template("{{ x }}") != digest_template("{{ x }} ")
    assert digest_template({"default": "a", "tool_use": "b"}) != digest_template("a")
