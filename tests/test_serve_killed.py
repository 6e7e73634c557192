"""`radixkv serve` killed with -9 while a batch runs: started again it answers each line once."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import tiny_models
from tests.http_server import WAIT_S

NUM_LINES = 30
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_models.build("llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(model_dir: Path, batch_dir: Path, log: Path) -> Iterator[tuple[Any, openai.OpenAI]]:
    """A process of its own, and a client of it; it is killed at the end, if it is there yet."""
    # Two at a time, so that it takes a while and some are answered long before the others.
    flags = ("--kv-memory", "4MiB", "--dtype", "float32", "--max-num-seqs", "2", "--port", "0")
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "radixkv", "serve", "--model", str(model_dir), *flags]
            + ["--batch-dir", str(batch_dir)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        assert process.stdout is not None
        curl = process.stdout.readline().decode()  # it is told once the server is ready
        assert curl, log.read_text()
        url = next(word for word in shlex.split(curl) if word.startswith("http://"))
        base = url.removesuffix("/chat/completions")
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def body(client: openai.OpenAI, i: int) -> dict[str, Any]:
    model = client.models.list().data[0].id
    return {
        "model": model,
        "prompt": [5 + i] * 20,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }


def begin(client: openai.OpenAI) -> str:
    lines = [
        {
            "custom_id": f"line {i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body(client, i) | {"ignore_eos": True},
        }
        for i in range(NUM_LINES)
    ]
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(raw)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def until(client: openai.OpenAI, batch_id: str, num_done: int) -> Any:
    """Poll until so many lines are answered."""
    deadline = time.monotonic() + WAIT_S
    while True:
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
        assert time.monotonic() < deadline, batch
        if counts is not None and counts.completed >= num_done:
            return batch
        time.sleep(0.02)


def test_a_killed_server_goes_on_where_it_was_and_answers_each_line_once(
    model_dir: Path, tmp_path: Path
) -> None:
    """And as a server that was left alone would have answered it."""
    with serving(model_dir, tmp_path / "batches", tmp_path / "first.log") as (process, client):
        batch_id = begin(client)
        seen = until(client, batch_id, 3)
        process.kill()
        process.wait()
    assert seen.request_counts.completed < NUM_LINES, "it was over too soon to be interrupted"
    with serving(model_dir, tmp_path / "batches", tmp_path / "second.log") as (_, client):
        batch = until(client, batch_id, NUM_LINES)
        while batch.status != "completed":
            batch = until(client, batch_id, NUM_LINES)
        assert batch.request_counts.failed == 0 and batch.error_file_id is None
        text = client.files.content(batch.output_file_id).text
        answers = [json.loads(line) for line in text.splitlines()]
        assert sorted(a["custom_id"] for a in answers) == sorted(
            f"line {i}" for i in range(NUM_LINES)
        )
        by_id = {a["custom_id"]: a["response"]["body"] for a in answers}
        for i in (0, NUM_LINES // 2, NUM_LINES - 1):
            alone = client.completions.create(**body(client, i), extra_body={"ignore_eos": True})
            assert by_id[f"line {i}"]["choices"][0]["text"] == alone.choices[0].text
