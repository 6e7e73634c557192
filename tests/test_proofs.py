"""A model is proven exact once on a machine, and again as soon as anything about it is new."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.service.engine import loading, proofs
from radixkv.service.engine.loading import LoadedModel, load_model
from tests import tiny_models


class Prover:
    """Stands in for the proof and counts how often it is asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.refuses = False

    def __call__(self, loaded: LoadedModel) -> None:
        self.asked += 1
        if self.refuses:
            raise UnsupportedModel("not exact")


@pytest.fixture
def prover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prover:
    """What proves models, with an empty memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prover = Prover()
    monkeypatch.setattr(loading, "refuse_if_inexact", prover)
    return prover


def save(folder: Path, seed: int = 0) -> Path:
    model, tokenizer = tiny_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += seed
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: str) -> LoadedModel:
    return load_model(folder, name="tiny", **({"dtype": "float32", "device": "cpu"} | settings))


def test_the_same_model_is_proven_once_wherever_it_lies(prover: Prover, tmp_path: Path) -> None:
    load(save(tmp_path / "a"))
    load(tmp_path / "a")
    load(save(tmp_path / "b"))
    assert prover.asked == 1


def test_other_weights_another_precision_or_decoder_are_proven_by_themselves(
    prover: Prover, tmp_path: Path
) -> None:
    load(save(tmp_path / "a"))
    load(save(tmp_path / "b", seed=1))
    load(tmp_path / "a", dtype="bfloat16")
    load(tmp_path / "a", decoder="generic")
    assert prover.asked == 4


def test_other_code_or_another_library_wants_its_own_proof(
    prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(save(tmp_path / "a"))
    monkeypatch.setattr(proofs, "_digest_code", lambda: "changed")
    load(tmp_path / "a")
    monkeypatch.setattr(numpy, "__version__", "99.0")
    load(tmp_path / "a")
    assert prover.asked == 3


def test_a_refusal_is_never_remembered(prover: Prover, tmp_path: Path) -> None:
    prover.refuses = True
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="not exact"):
            load(save(tmp_path / "a"))
    prover.refuses = False
    load(tmp_path / "a")
    assert prover.asked == 3


def test_a_model_in_memory_is_always_proven(prover: Prover) -> None:
    for _ in range(2):
        model, tokenizer = tiny_models.build("llama")
        LoadedModel.from_model(model, tokenizer, name="tiny")
    assert prover.asked == 2


def test_where_nothing_can_be_kept_the_proof_is_made_each_time(
    prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "touch", full)
    folder = save(tmp_path / "a")
    load(folder)
    load(folder)
    assert prover.asked == 2
