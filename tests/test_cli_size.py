"""``radixkv size`` and ``radixkv simulate``, as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixkv.service.cli import app

LLAMA2_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA2_70B))
    return str(path)


def test_size_counts_blocks_and_sequences(config: str) -> None:
    ask = ["size", "--model", config, "--kv-memory", "10GiB", "--context", "1000", "--json"]
    done = CliRunner().invoke(app, ask)
    facts = json.loads(done.stdout)
    assert facts["bytes_per_token"] == 327_680
    assert facts["blocks"] == 10 * 2**30 // (16 * 327_680)
    assert facts["sequence_blocks"] == 63 and facts["wasted_slots"] == 8
    assert facts["sequences"] == facts["blocks"] // 63


def test_of_a_devices_memory_the_weights_are_taken_off(config: str) -> None:
    ask = ["size", "--model", config, "--gpu-memory", "160GiB", "--json"]
    facts = json.loads(CliRunner().invoke(app, ask).stdout)
    assert facts["kv_bytes"] == int(0.9 * 160 * 2**30) - facts["weight_bytes_estimated"]
    done = CliRunner().invoke(app, ["size", "--model", config, "--gpu-memory", "80GiB"])
    assert done.exit_code == 2 and "less than the weights" in done.stderr


def test_a_table_is_for_people(config: str) -> None:
    done = CliRunner().invoke(app, ["size", "--model", config])
    assert done.exit_code == 0 and "327,680 bytes" in done.stdout and "GQA" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "no/such/config.json"], "there is no"),
        (["--kv-memory", "much"], "kv-memory"),
        (["--kv-memory", "1GiB", "--gpu-memory", "2GiB"], "not both"),
        (["--kv-dtype", "int3"], "int3"),
    ],
)
def test_wrong_flags_are_told_in_a_sentence(config: str, flags: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["size", "--model", config, *flags])
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_fragmentation_is_simulated_and_compared(tmp_path: Path) -> None:
    ask = ["simulate", "fragmentation", "--requests", "200", "--no-curve"]
    shown = CliRunner().invoke(app, ask).stdout
    assert "oracle" in shown and "96.3" in shown
    found = json.loads(CliRunner().invoke(app, [*ask, "--json", "--shared", "80"]).stdout)
    assert [usage["strategy"] for usage in found["usages"]] == [
        "max",
        "pow2",
        "oracle",
        "paged",
        "paged, +80",
        "paged, 80 shared",
    ]


def test_an_unknown_workload_is_named() -> None:
    done = CliRunner().invoke(app, ["simulate", "fragmentation", "--workload", "mine"])
    assert done.exit_code == 2 and "sharegpt, alpaca" in done.stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setattr(
        "radixkv.service.cli_size.fragmentation", lambda *a, **b: pytest.fail("it was computed")
    )
    ask = ["simulate", "fragmentation", "--plot", str(tmp_path / "waste.png")]
    done = CliRunner().invoke(app, ask)
    assert done.exit_code == 2 and done.stdout == ""
    said = " ".join(done.stderr.split())
    assert "--plot needs matplotlib; install it with: pip install matplotlib" in said
