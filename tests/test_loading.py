"""What a model's name means, what of it is refused, and what a loaded model says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from radixkv.errors import InvalidConfig, NotFound, UnsupportedModel
from radixkv.identity.identity import Namespace
from radixkv.service.engine.loading import (
    LoadedModel,
    choose_device,
    choose_dtype,
    load_model,
    resolve_model,
)
from tests.tiny_models import build, build_tokenizer

PUBLIC = Namespace.public()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory as transformers saves it."""
    model, tokenizer = build("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(resolve_model(str(path)), name="test", **({"dtype": "float32"} | settings))


def test_a_directory_loads_as_what_was_saved(directory: Path) -> None:
    loaded = _load(directory)
    model, _ = build("llama")
    assert loaded.path == directory and loaded.name == "test"
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (2, 2, 16)
    assert loaded.vocab_size == 310 and loaded.max_model_len == 4096
    assert loaded.dtype == loaded.kv_dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)


def test_identity_follows_contents_and_not_places(directory: Path, tmp_path: Path) -> None:
    first = _load(directory).identity(PUBLIC, 16)
    moved = directory.rename(tmp_path / "elsewhere")
    loaded = load_model(moved, name="another name", dtype="float32")
    assert loaded.identity(PUBLIC, 16) == first
    assert loaded.identity(PUBLIC, 16) is loaded.identity(PUBLIC, 16)
    assert first.difference(loaded.identity(PUBLIC, 32)) == ("execution.block_size",)
    tenant = loaded.identity(Namespace(tenant="a", salt="b"), 16)
    assert set(first.difference(tenant)) == {"namespace.tenant", "namespace.salt"}


def test_the_same_weights_in_another_dtype_are_another_identity(directory: Path) -> None:
    wide, narrow = _load(directory), _load(directory, dtype="bfloat16")
    assert narrow.dtype == narrow.kv_dtype == torch.bfloat16
    names = wide.identity(PUBLIC, 16).difference(narrow.identity(PUBLIC, 16))
    assert {"model", "execution.kv_dtype"} <= set(names)


def test_changed_weights_are_another_identity_and_old_ones_the_old() -> None:
    """ADMIN-1, IDENTITY-5: the same shapes and name with other weights share nothing."""
    model, tokenizer = build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="x")
    before = loaded.identity(PUBLIC, 16)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[3, 5] += 1
    loaded.weights_changed()
    assert before.difference(loaded.identity(PUBLIC, 16)) == ("model",)
    with torch.no_grad():
        weight.copy_(build("llama")[0].model.layers[1].mlp.up_proj.weight)
    loaded.weights_changed()
    assert loaded.identity(PUBLIC, 16) == before


def test_every_eos_of_config_and_tokenizer_counts() -> None:
    model, tokenizer = build("llama")
    model.generation_config.eos_token_id = [0, 7]
    assert LoadedModel.from_model(model, tokenizer, name="x").eos_token_ids == {0, 2, 7}


def test_a_directory_without_safetensors_is_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=f"{directory}.*safetensors"):
        resolve_model(str(directory))


def test_pickled_weights_are_never_opened(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(UnsupportedModel, match="pickle"):
        resolve_model(str(directory))


def test_a_torn_weights_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidConfig, match=str(directory)):
        _load(directory)


def test_missing_weights_are_not_made_up(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        _load(directory)


def test_weights_of_another_shape_are_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(InvalidConfig, match=str(directory)):
        _load(directory)


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    headless: Any = LlamaForSequenceClassification
    headless(build("llama")[0].config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="lm_head"):
        _load(tmp_path)


def test_a_missing_tokenizer_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=f"{directory} has no tokenizer"):
        _load(directory)


def test_a_damaged_tokenizer_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(InvalidConfig, match=f"tokenizer in {directory}"):
        _load(directory)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no-such-kind"},
        {"model_type": "no-such-kind", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"model_type": "vit"},
        {"model_type": "t5"},
    ],
)
def test_a_config_of_no_model_that_we_serve_is_refused_and_its_code_not_run(
    directory: Path, config: dict[str, Any]
) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(UnsupportedModel, match=str(directory)):
        _load(directory)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("./no/such/place", NotFound, "./no/such/place"),
        ("/no/such/place", NotFound, "/no/such/place"),
        ("~/no-such.gguf", NotFound, "no-such.gguf"),
        ("nothing.gguf", NotFound, "nothing.gguf"),
        ("two words", NotFound, "hub name such as org/name"),
        ("a/b/c", NotFound, "hub name such as org/name"),
    ],
)
def test_a_name_that_means_nothing_is_repeated(
    name: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(InvalidConfig, match=r"model\.txt is a file but not a \.gguf"):
        resolve_model(str(tmp_path / "model.txt"))
    with pytest.raises(NotFound, match="neither a config.json nor a .gguf"):
        resolve_model(str(tmp_path))


def test_a_hub_name_without_the_hub_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(NotFound, match="no directory 'some-org/some-model' here.*local cache"):
        resolve_model("some-org/some-model")


def test_a_hub_name_in_the_local_cache_needs_no_network(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some-org--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    snapshot = directory.rename(repository / "snapshots" / ("a" * 40))
    assert resolve_model("some-org/some-model") == snapshot
    assert load_model(snapshot, name="some-org/some-model", dtype="float32").num_layers == 2


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:x", "cuda:9999"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(InvalidConfig, match=f"device is '{device}'"):
        choose_device(device)


def test_dtype_auto_is_what_the_device_multiplies_fast() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16
    assert choose_dtype("float32", cpu) == torch.float32
    assert choose_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    with pytest.raises(InvalidConfig, match="accepted: auto, bfloat16, float32"):
        choose_dtype("int3", cpu)


def test_the_embedded_model_speaks_its_template(smollm2: LoadedModel) -> None:
    """TEMPLATE-4: the rendered text and the template's own ids agree, special tokens are single."""
    tokenizer = smollm2.tokenizer
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text).input_ids == ids
    assert ids[:2] == [1, 9690] and ids.count(1) == 3 and ids.count(2) == 2
    assert smollm2.eos_token_ids == {0, 2}
    assert smollm2.max_model_len == 8192 and smollm2.vocab_size == 49152
    for text in (
        "In  1999, 12345 cats",
        "Ünïcode 🎉 你好\n\n\n  x",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
