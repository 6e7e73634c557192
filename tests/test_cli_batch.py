"""``radixkv batch`` as a process: killed in the middle, resumed, and what it refuses beforehand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixkv.service.cli import app
from tests import tiny_models
from tests.batch_cases import completion, read_lines, three_levels, write_lines

EXAMPLE = Path(__file__).parent.parent / "examples" / "batch_requests.jsonl"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_models.build("llama")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return CliRunner()


def test_kill_9_in_the_middle_and_resume_give_each_line_exactly_once(
    model_dir: Path, tmp_path: Path
) -> None:
    """BATCH-2: the process dies without a word; what it had written stays, the rest follows."""
    lines, _ = three_levels(120, max_tokens=60)
    source = write_lines(tmp_path / "in.jsonl", [*lines, "no request at all"])
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "radixkv", "batch", str(source), "-o", str(output)]
    command += ["--model", str(model_dir), "--kv-memory", "8MiB", "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < 12:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    written = output.read_bytes()
    kept = written.count(b"\n")
    assert 12 <= kept < 121
    output.write_bytes(written + b'{"id":"batch_req_0","custom_id":"li')  # as if it died in a write
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr  # what is no request was refused before
    assert output.read_bytes().startswith(written)
    results = read_lines(output)
    assert sorted(str(r["custom_id"]) for r in results) == sorted(
        ["None", *(line["custom_id"] for line in lines)]
    )
    words = " ".join(again.stderr.split())
    assert f"going on: {kept} lines are done" in words
    assert "no more were computed" in words
    assert f"{kept} answered before" in words


def test_what_is_wrong_is_said_before_a_model_is_loaded(cli: CliRunner, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("a", "b")])
    (tmp_path / "out.jsonl").write_text("something\n")
    for args, words in (
        ([str(tmp_path / "none"), "-o", str(tmp_path / "x")], "is no file"),
        ([str(source), "-o", str(source)], "is the file of requests"),
        ([str(source), "-o", str(tmp_path / "out.jsonl")], "exists; go on with --resume"),
        ([str(source), "-o", str(tmp_path / "out.jsonl"), "--resume"], "is no output of a batch"),
        ([str(source), "-o", str(tmp_path / "no" / "x")], "is no directory"),
        ([str(source), "-o", str(tmp_path / "x"), "--block-size", "0"], "block_size is 0"),
    ):
        result = cli.invoke(app, ["batch", *args])
        assert (result.exit_code, words in result.output) == (2, True), result.output
    assert (tmp_path / "out.jsonl").read_text() == "something\n"


@pytest.mark.soak
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_what_was_answered(model_dir: Path, tmp_path: Path) -> None:
    lines, _ = three_levels(60, max_tokens=200)
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "radixkv", "batch", str(source), "-o", str(output)]
    command += ["--model", str(model_dir), "--kv-memory", "8MiB", "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume goes on" in said
    assert 0 < len(read_lines(output)) < 60


def test_the_example_is_a_file_of_requests_with_names_of_their_own() -> None:
    names = [line["custom_id"] for line in read_lines(EXAMPLE)]
    assert len(set(names)) == len(names) == 10
