"""Pools of one byte a number: what fits, what is shared, how far logits move, who may have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv.config import EngineConfig
from radixkv.errors import InvalidConfig
from radixkv.identity.identity import Namespace
from radixkv.kernels.native import unavailable_reason
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.building import kv_dtype_of
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner
from tests.tiny_models import build

BOUND = {"int8": 0.03, "fp8_e4m3": 0.13}
"""Greatest ||difference|| / ||logits|| of a prompt over a pool of codes, for a model whose random
weights are drawn wide. Each number of a key or value is off by at most 1/254 of its vector's
largest (int8) or by 1/16 of itself (fp8); a wrong key moves logits by more than 1."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model, tokenizer = build("llama")
    return LoadedModel.from_model(model, tokenizer, name="tiny", decoder="generic")


def prompt_logits(loaded: LoadedModel, kv_dtype: torch.dtype | None) -> torch.Tensor:
    """Logits of 60 tokens that read 60 others from the pool."""
    ids = np.random.default_rng(0).integers(3, 300, 120)
    runner = ModelRunner(loaded, 8, 16, kv_dtype=kv_dtype)
    for start in (0, 60):
        batch = StepBatch(
            token_ids=ids[start : start + 60],
            query_lens=np.array([60], np.int32),
            kv_lens=np.array([start + 60], np.int32),
            block_tables=np.array([[5, 2, 7, 1, 0, 3, 6, 4]], np.int32),
            logit_rows=np.arange(60),
        )
        logits = runner.forward(batch)
    return logits


@pytest.mark.parametrize("name", BOUND)
def test_logits_move_no_further_than_is_stated(loaded: LoadedModel, name: str) -> None:
    config = EngineConfig(kv_dtype=name)
    want, got = prompt_logits(loaded, None), prompt_logits(loaded, kv_dtype_of(config))
    error = float((got - want).norm() / want.norm())
    assert 0 < error < BOUND[name]


@pytest.mark.parametrize("name", BOUND)
def test_more_tokens_fit_and_codes_are_shared_with_their_like_alone(
    loaded: LoadedModel, name: str
) -> None:
    """IDENTITY: the same weights and tokens over another kind of pool are another identity."""
    dtype = kv_dtype_of(EngineConfig(kv_dtype=name))
    with Engine(loaded, kv_memory="2MiB", kv_dtype=name) as small, Engine(loaded) as plain:
        # 16 numbers and a scale a head: 20 bytes where float32 takes 64.
        assert small.bytes_per_block * 64 == plain.bytes_per_block * 20
        assert small.stats().cache.num_blocks == 2 * 2**20 // small.bytes_per_block
        first = small.generate(list(range(3, 90)), max_tokens=4, temperature=0)
        again = small.generate(list(range(3, 90)), max_tokens=4, temperature=0)
        assert again.usage.cached_tokens >= 80 and again.token_ids == first.token_ids
    public = Namespace.public()
    codes = loaded.identity(public, 16, kv_dtype=dtype)
    assert codes == loaded.identity(public, 16, kv_dtype=dtype)
    other = loaded.identity(public, 16)
    assert codes.difference(other) == ("execution.kv_dtype", "execution.kv_scales")


def test_the_compiled_decoder_refuses_codes_and_says_why() -> None:
    for settings in ({"decoder": "native"}, {"deterministic": True}):
        with pytest.raises(InvalidConfig, match="stores what it computes and knows no codes"):
            EngineConfig(kv_dtype="int8", **settings)
    with pytest.raises(InvalidConfig, match="accepted: auto, fp8_e4m3, int8"):
        EngineConfig(kv_dtype="int4")
    if unavailable_reason() is not None:
        return
    model, tokenizer = build("llama")
    native = LoadedModel.from_model(model, tokenizer, name="tiny")
    with pytest.raises(InvalidConfig, match="was loaded for the compiled decoder"):
        Engine(native, kv_dtype="int8")
