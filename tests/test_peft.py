"""Adapters are read as PEFT saved them, and what is not understood is refused by name."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.errors import InvalidAdapter, NotFound
from radixkv.service.engine.peft import read_peft
from tests.adapter_cases import edit_config, edit_weights, save_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder, r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def test_every_targeted_layer_is_found_with_its_scale(saved: Path) -> None:
    adapter = read_peft(saved)
    assert sorted(adapter.layers) == [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp.down_proj", "self_attn.q_proj")
    ]
    assert {layer.scale for layer in adapter.layers.values()} == {1.5}
    assert adapter.max_rank == 4
    assert adapter.targets("model.layers.7.self_attn.q_proj")
    assert not adapter.targets("model.layers.0.self_attn.k_proj")


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3}}, 0.5),
        ({"alpha_pattern": {"k_proj": 2}}, 1.5),
        ({"lora_dropout": 0.3, "base_model_name_or_path": "elsewhere"}, 1.5),
    ],
)
def test_the_scale_is_that_of_peft(folder: Path, changes: dict[str, Any], scale: float) -> None:
    edit_config(folder, **changes)
    layer = read_peft(folder).layers["model.layers.0.self_attn.q_proj"]
    assert layer.scale == pytest.approx(scale)


def test_the_digest_is_of_contents_and_scale_alone(folder: Path, tmp_path: Path) -> None:
    """IDENTITY-2: where an adapter lies says nothing, what it computes says all."""
    digest = read_peft(folder).digest
    moved = Path(shutil.copytree(folder, tmp_path / "other-name"))
    edit_config(moved, base_model_name_or_path="elsewhere", inference_mode=False)
    assert read_peft(moved).digest == digest
    others = [read_peft(folder, scale=0.5).digest]
    edit_config(moved, lora_alpha=7)
    others.append(read_peft(moved).digest)
    edit_config(moved, lora_alpha=6, alpha_pattern={"layers.1.mlp.down_proj": 7})
    others.append(read_peft(moved).digest)
    weight = read_peft(folder).layers["model.layers.0.self_attn.q_proj"].a.clone()
    weight[0, 0] += 1e-3
    edit_weights(folder, **{f"{Q}.lora_A.weight": weight})
    others.append(read_peft(folder).digest)
    assert len({digest, *others}) == 5


def test_a_file_that_is_overwritten_later_changes_nothing(folder: Path) -> None:
    adapter = read_peft(folder)
    before = {path: layer.a.clone() for path, layer in adapter.layers.items()}
    file = folder / "adapter_model.safetensors"
    with file.open("r+b") as f:  # in place, as a copy over it would do
        f.seek(-4096, 2)
        f.write(b"\0" * 4096)
    assert all(torch.equal(adapter.layers[path].a, a) for path, a in before.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: it replaces"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"invented_in_2030": {"a": 1}}, "invented_in_2030: it is not known here"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "wanted rank 5"),
        ({"r": "4"}, "r is '4'"),
        ({"rank_pattern": {"q_proj": 2}}, "wanted rank 2"),
        ({"rank_pattern": {"(": 2}}, "unterminated"),
        ({"rank_pattern": [1]}, "rank_pattern is"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"target_modules": [1]}, "target_modules is"),
    ],
)
def test_what_a_config_asks_beyond_low_rank_products_is_refused_by_name(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(InvalidAdapter) as error:
        read_peft(folder)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q}.lora_B.weight": None}, "only one of lora_A and lora_B"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}, "not finite"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int32)}, "torch.int32"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}, "embedding"),
        ({"base_model.model.lm_head.weight": torch.ones(4, 4)}, "lm_head"),
    ],
)
def test_weights_that_are_no_pairs_of_factors_are_refused_by_name(
    folder: Path, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    edit_weights(folder, **changes)
    with pytest.raises(InvalidAdapter) as error:
        read_peft(folder)
    assert words in str(error.value)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(NotFound, match=r"adapter_model\.bin is a pickle"):
        read_peft(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(
    folder: Path, name: str
) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InvalidAdapter, match="no regular file"):
        read_peft(folder)


def test_what_is_not_there_or_damaged_is_said(folder: Path) -> None:
    with pytest.raises(NotFound, match="no such directory"):
        read_peft(folder / "nowhere")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        read_peft(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        read_peft(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(NotFound, match=r"no adapter_config\.json"):
        read_peft(folder)
