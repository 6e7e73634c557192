"""What an engine is built of: the settings that depend on the model and the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from radixkv import EngineConfig
from radixkv.service.engine.building import step_tokens_of
from radixkv.service.engine.loading import LoadedModel
from tests import tiny_models


def test_steps_are_shorter_on_a_cpu_unless_they_are_set() -> None:
    model, tokenizer = tiny_models.build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny-llama")
    assert step_tokens_of(loaded, EngineConfig()) == 256
    assert step_tokens_of(loaded, EngineConfig(max_batch_tokens=48)) == 48
    elsewhere = replace(loaded, device=torch.device("cuda"))
    assert step_tokens_of(elsewhere, EngineConfig()) == 512
