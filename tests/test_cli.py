"""The command line as a person meets it: help, refusals, a start and a stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import radixkv
from radixkv.service.cli import app
from radixkv.service.cli_serve import curl_line
from radixkv.service.config import setting_names
from radixkv.service.logs import JsonLines, TextLines, configure_logs


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The command line sends its process's log to stderr; here that process is the tests' own."""
    logger = logging.getLogger("radixkv")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return CliRunner()


def test_version_is_told(cli: CliRunner) -> None:
    assert cli.invoke(app, ["--version"]).output == f"radixkv {radixkv.__version__}\n"


def test_every_setting_is_a_flag_with_a_line_of_help(cli: CliRunner) -> None:
    text = cli.invoke(app, ["serve", "--help"]).output
    for name in setting_names():
        assert "--" + name.replace("_", "-") in text, name
    assert "--no-prefix-cache" in text
    for option in get_command(app).commands["serve"].params:  # type: ignore[attr-defined]
        assert "default" in str(option.help).lower(), option.name


def test_an_unknown_flag_is_answered_with_a_near_one(cli: CliRunner) -> None:
    result = cli.invoke(app, ["serve", "--kv-memry", "1GiB"])
    assert result.exit_code == 2
    assert "--kv-memory" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--dtype", "int4"], "accepted: auto, bfloat16, float32"),
        (["--device", "tpu"], "accepted: auto, cpu, cuda, cuda:INDEX"),
        (["--decoder", "fast"], "accepted: auto, native, generic"),
        (["--kv-memory", "big"], "--kv-memory is 'big'"),
        (["--block-size", "0"], "block_size is 0; wanted a whole number from 1 to 256"),
        (["--host", "0.0.0.0"], "--insecure-remote"),
        (["--config", "nowhere.toml"], "there is no such file"),
        (["--log-format", "xml"], "accepted: text, json"),
        (["--host", "256.1.1.1", "--insecure-remote"], "no address of this machine"),
    ],
)
def test_a_bad_value_ends_with_2_and_what_is_accepted(
    cli: CliRunner, args: list[str], words: str
) -> None:
    result = cli.invoke(app, ["serve", *args])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_port_in_use_is_said_before_anything_is_loaded(cli: CliRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli.invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} on 127.0.0.1 is in use" in result.output
    assert "--port" in result.output


def test_chat_without_a_server_says_how_to_start_one(cli: CliRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    result = cli.invoke(app, ["chat", "--url", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 2
    assert "no server answers" in result.output
    assert "radixkv serve" in result.output


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:9000", "it's/a model"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:9000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's/a model"
    assert body["stream"] is True


async def test_serve_tells_its_progress_serves_and_ends_with_0_when_asked(tmp_path: Path) -> None:
    """A process of its own, with a tiny model from a folder; SIGTERM while nothing runs."""
    from tests import tiny_models

    model, tokenizer = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixkv", "serve", "--model", str(tmp_path), "--port", "0"),
        *("--kv-memory", "4MiB", "--dtype", "float32", "--max-model-len", "256"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(60):
            curl = (await process.stdout.readline()).decode()
            if not curl:
                pytest.fail((await process.stderr.read()).decode())
            words = shlex.split(curl)
            answer = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            said, _ = await answer.communicate()
            process.send_signal(signal.SIGTERM)
            told = (await process.stderr.read()).decode()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b"data: [DONE]" in said
    for word in ("loading", "warming up", "serving", "stopping", "stopped"):
        assert word in told
    assert "status=200" in told


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
EARLY: tuple[Any, ...] = (
    ({}, ["--model", "./nope"], "./nope does not exist"),
    ({}, ["--model", "/nope.gguf"], "/nope.gguf does not exist"),
    ({}, ["--kv-memory", "600KB"], "this model needs 368640 for a block of 16 tokens"),
    ({}, ["--max-model-len", "4096"], "max_model_len is 4096; this model was made for 2048"),
    ({"architectures": ["Gemma3ForCausalLM"]}, ["--deterministic"],
     "deterministic is on, which needs the compiled decoder, and it cannot be: Gemma3ForCausalLM"),
    ({}, ["--decoder", "native", "--device", "cuda"], "it runs on the CPU, and device is 'cuda'"),
)  # fmt: skip


def test_what_the_path_and_the_config_rule_out_is_told_before_torch_is_loaded(
    tmp_path: Path,
) -> None:
    """One process for all, which must not have imported torch at its end."""
    commands = []
    for i, (about, flags, _) in enumerate(EARLY):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | about))
        (folder / "model.safetensors").touch()
        model = [] if "--model" in flags else ["--model", str(folder)]
        commands.append(["serve", "--port", "0", *model, *flags])
    code = f"""
import sys
from typer.testing import CliRunner
from radixkv.service.cli import app
for command in {commands!r}:
    result = CliRunner().invoke(app, command)
    print(result.exit_code, "torch" in sys.modules, " ".join(result.output.split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(EARLY), done.stderr
    for line, (_, flags, words) in zip(lines, EARLY, strict=True):
        assert line.startswith("2 False ") and words in line, (flags, line)


async def test_with_a_json_log_every_line_is_json(tmp_path: Path) -> None:
    """No progress bars, no warnings of libraries; a generic model, and the log says why."""
    from tests import tiny_models

    model, tokenizer = tiny_models.build("gemma3")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixkv", "serve", "--model", str(tmp_path), "--port", "0"),
        *("--kv-memory", "4MiB", "--log-format", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            while not lines or "serving" not in lines[-1]:
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], lines
            process.send_signal(signal.SIGTERM)
            lines += (await process.stderr.read()).decode().splitlines()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    messages = [json.loads(line)["message"] for line in lines]
    why = [m for m in messages if "Gemma3ForCausalLM is not one of" in m]
    assert len(why) == 1 and "not the compiled decoder" in why[0]
    assert any("generic decoder" in m for m in messages if m.startswith("serving"))


def test_the_example_says_what_to_install_where_openais_client_is_missing() -> None:
    file = Path(__file__).parents[1] / "examples" / "chat_with_openai_client.py"
    code = (
        "import runpy, sys; sys.modules['openai'] = None; "
        f"runpy.run_path({str(file)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install openai" in done.stderr and "Traceback" not in done.stderr


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sys, radixkv.service.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("radixkv.http", logging.INFO, __file__, 1, "request", (), None)
    made.fields = fields
    return made


def test_a_log_line_stays_one_line_whatever_a_caller_sends() -> None:
    forged = "x\n12:00:00 INFO request id=other"
    line = TextLines().format(record(id=forged, ttft_s=0.25, error=None))
    assert "\n" not in line
    assert "ttft_s=0.250" in line and "error" not in line
    assert json.loads(JsonLines().format(record(id=forged)))["id"] == forged


def test_configuring_logs_twice_writes_each_line_once() -> None:
    out = StringIO()
    configure_logs("json", StringIO())
    configure_logs("json", out)
    logging.getLogger("radixkv.http").info("request", extra={"fields": {"status": 200}})
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["status"] == 200


def test_log_lines_go_to_what_stderr_is_when_they_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a command that ran inside of another process, whose stderr is closed since."""
    log = logging.getLogger("radixkv.server")
    with monkeypatch.context() as patch, StringIO() as then:
        patch.setattr(sys, "stderr", then)
        configure_logs("text")
        log.info("first")
        assert "first" in then.getvalue()
    log.info("second")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO    second")
