"""A GGUF file becomes a directory once, whole or not at all, and computes what the model did."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock

from radixkv.errors import InvalidConfig, UnsupportedModel
from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.gguf import convert_gguf, read_metadata
from radixkv.service.engine.loading import load_model, resolve_model
from tests.tiny_models import build


def _write_gguf(path: Path, *, arch: str = "llama", pre: str = "smollm") -> Any:
    """Write a tiny Llama with its tokenizer as llama.cpp's converter lays it out; return it."""
    model, tokenizer = build("llama", num_key_value_heads=2)
    config = model.config
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocab[-1] = "ĠĠ"  # shows whether digits were split off before the blanks before them
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if t.startswith("<|") else 1 for t in vocab])
    writer.add_token_merges(["t h", "th e", "i n", "Ġ Ġ"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp turns neighbours, not halves
            heads = array.shape[0] // config.head_dim
            halves = array.reshape(heads, 2, config.head_dim // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    _write_gguf(path)
    return path


def test_the_converted_model_computes_what_the_original_does(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    directory = resolve_model(str(source), cache_dir=tmp_path, progress=said.append)
    assert said[0].startswith("converting tiny.gguf") and len(said) == 4
    loaded = load_model(directory, name="tiny", dtype="float32")
    model, _ = build("llama")
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    ids = torch.arange(3, 60)[None]
    wanted = model(ids).logits
    with own_attention(loaded.model):
        torch.testing.assert_close(loaded.model(ids).logits, wanted, rtol=1e-3, atol=1e-3)


def test_neighbours_of_the_file_take_no_part(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(source.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a neighbour"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    directory = convert_gguf(path, tmp_path)
    loaded = load_model(directory, name="tiny", dtype="float32")
    assert "im_start" in loaded.tokenizer.chat_template and loaded.eos_token_ids == {0, 2}
    assert not [p for p in directory.iterdir() if p.is_dir() or p.is_symlink()]


def test_end_tokens_digits_and_template_come_along(source: Path, tmp_path: Path) -> None:
    loaded = load_model(convert_gguf(source, tmp_path), name="tiny", dtype="float32")
    assert loaded.eos_token_ids == {0, 2}
    tokenizer = loaded.tokenizer
    assert tokenizer("<|im_start|>the").input_ids[0] == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer("  19").input_ids) == ["ĠĠ", "1", "9"]
    assert "<|im_start|>" in tokenizer.chat_template


def test_the_second_time_reads_nothing_but_the_file(source: Path, tmp_path: Path) -> None:
    first = convert_gguf(source, tmp_path)
    stamp = first.stat().st_mtime_ns
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(source.read_bytes())
    said: list[str] = []
    assert convert_gguf(copy, tmp_path, progress=said.append) == first
    assert first.stat().st_mtime_ns == stamp and said == []


def test_what_a_crash_left_behind_is_cleared_away(source: Path, tmp_path: Path) -> None:
    finished = convert_gguf(source, tmp_path)
    torn = finished.parent / f".{finished.name}.abcd1234"
    finished.rename(torn)
    (torn / "model.safetensors").write_bytes(b"half")
    assert convert_gguf(source, tmp_path) == finished
    assert not torn.exists()
    assert load_model(finished, name="tiny", dtype="float32").num_layers == 2


def test_two_starts_at_once_convert_once(source: Path, tmp_path: Path) -> None:
    lock_of_other = FileLock(_lock_path(source, tmp_path))
    waiting = threading.Event()

    def note(message: str) -> None:
        said.append(message)
        if "waiting" in message:
            waiting.set()

    said: list[str] = []
    found: list[Path] = []
    with lock_of_other:
        second = threading.Thread(
            target=lambda: found.append(convert_gguf(source, tmp_path, progress=note))
        )
        second.start()
        assert waiting.wait(30)
        assert found == []
    second.join(60)
    assert found and found[0].is_dir()


def _lock_path(source: Path, cache_dir: Path) -> Path:
    finished = convert_gguf(source, cache_dir / "elsewhere")
    (cache_dir / "gguf").mkdir()
    return cache_dir / "gguf" / f"{finished.name}.lock"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    _write_gguf(path, arch="no-such-architecture")
    with pytest.raises(UnsupportedModel, match="no-such-architecture"):
        convert_gguf(path, tmp_path)
    assert [p.suffix for p in (tmp_path / "gguf").iterdir()] in ([], [".lock"])


@pytest.mark.parametrize("keep", [3, 12, 40, 2000])
def test_a_file_that_ends_too_soon_is_named(source: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "torn.gguf"
    path.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(InvalidConfig, match="torn.gguf"):
        resolve_model(str(path), cache_dir=tmp_path)


def test_missing_tensor_data_is_an_error_that_names_the_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "torn.gguf"
    path.write_bytes(source.read_bytes()[:-5000])
    with pytest.raises((InvalidConfig, UnsupportedModel), match="torn.gguf"):
        convert_gguf(path, tmp_path)


def test_another_kind_of_file_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello, hello, hello, hello")
    with pytest.raises(InvalidConfig, match="does not begin with 'GGUF'"):
        resolve_model(str(path), cache_dir=tmp_path)


def test_a_folder_with_one_gguf_file_means_that_file(source: Path, tmp_path: Path) -> None:
    found = resolve_model(str(source.parent), cache_dir=tmp_path)
    assert found == resolve_model(str(source), cache_dir=tmp_path)


def test_metadata_is_read_without_the_tensors(source: Path) -> None:
    found = read_metadata(source)
    assert found["general.architecture"] == "llama"
    assert found["llama.attention.head_count_kv"] == 2
    assert found["tokenizer.ggml.pre"] == "smollm"
    assert "tokenizer.ggml.tokens" not in found
