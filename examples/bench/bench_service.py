"""What the cache is worth over HTTP: start servers, send prompts, compare in one run.

    python examples/bench/bench_service.py [--quick] [--threads N] [--output FILE.json]

Measured: time to first token (TTFT) cold and with most of the prompt cached; a burst of requests
that share a cold prefix, with the cache and with --no-prefix-cache; single-stream decoding beside
``transformers.generate`` on the same weights, dtype and threads. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

VOCAB = range(1000, 40_000)
console = Console(stderr=True)


@dataclass
class Answer:
    """One streamed completion as the client saw it; seconds since the request was sent."""

    ttft_s: float
    wall_s: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.tokens - 1) / (self.wall_s - self.ttft_s)


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCAB) for _ in range(length)]


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """A server of its own process on a free port; yields its URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixkv", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_until_ready(url, process))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


async def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(1200):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(f"the server ended:\n{process.stderr.read().decode()}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.25)
    sys.exit("the server did not come up in 5 minutes")


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int
) -> Answer:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in _events(response):
            if event["choices"] and first is None:
                first = time.perf_counter()
            usage = event.get("usage") or usage
    assert first is not None, "no token came"
    return Answer(
        ttft_s=first - sent,
        wall_s=time.perf_counter() - sent,
        tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                sys.exit(f"the server says: {event['error']}")
            yield event


async def counter(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(f"radixkv:{name}"):
                return float(line.rsplit(" ", 1)[1])
    sys.exit(f"no metric radixkv:{name}")


async def ttft(url: str, rounds: int) -> dict[str, float]:
    """A prompt of 1,024 tokens, cold, and then with 1,000 of them cached."""
    cold, warm = [], []
    async with aiohttp.ClientSession() as session:
        await ask(session, url, random_prompt(64, 1), 8)  # first-call costs
        for i in range(rounds):
            prompt = random_prompt(1024, 100 + i)
            cold.append(await ask(session, url, prompt, 2))
            other_end = prompt[:1000] + random_prompt(24, 200 + i)
            warm.append(await ask(session, url, other_end, 2))
    assert all(answer.cached_tokens == 0 for answer in cold)
    assert all(answer.cached_tokens == 1000 for answer in warm)
    cold_s = statistics.median(answer.ttft_s for answer in cold)
    warm_s = statistics.median(answer.ttft_s for answer in warm)
    return {"cold_ms": cold_s * 1e3, "warm_ms": warm_s * 1e3, "warm_over_cold": warm_s / cold_s}


async def burst(url: str, requests: int, shared: int) -> dict[str, float]:
    """``requests`` prompts at once: ``shared`` cold tokens in common, 32 of their own, 32 out."""
    prefix = random_prompt(shared, 7)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        before = await counter(session, url, "prompt_tokens_computed_total")
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(ask(session, url, prefix + random_prompt(32, 1000 + i), 32) for i in range(requests))
        )
        wall_s = time.perf_counter() - started
        computed = await counter(session, url, "prompt_tokens_computed_total") - before
    return {
        "wall_s": wall_s,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "prompt_tokens_computed": computed,
    }


async def decode(url: str, rounds: int, tokens: int) -> float:
    """Tokens a second of one stream."""
    async with aiohttp.ClientSession() as session:
        answers = [
            await ask(session, url, random_prompt(64, 300 + i), tokens) for i in range(rounds)
        ]
    return statistics.median(answer.decode_tokens_per_s for answer in answers)


TRANSFORMERS = """
import json, statistics, sys, time
import torch
from transformers import AutoModelForCausalLM
path, dtype, threads, rounds, tokens = sys.argv[1:6]
if int(threads):
    torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
def run(ids, n):
    x = torch.tensor([ids]); t = time.perf_counter()
    model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, min_new_tokens=n,
                   do_sample=False, pad_token_id=0)
    return time.perf_counter() - t
prompts = json.load(sys.stdin)
run(prompts[0], 4)
rates = []
for ids in prompts[:int(rounds)]:
    short = run(ids, 1)
    rates.append((int(tokens) - 1) / (run(ids, int(tokens)) - short))
print(json.dumps(statistics.median(rates)))
"""


def transformers_decode(path: str, dtype: str, threads: int, rounds: int, tokens: int) -> float:
    """The same by transformers' own generate, in a process of its own."""
    prompts = [random_prompt(64, 300 + i) for i in range(rounds)]
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, path, dtype, str(threads), str(rounds), str(tokens)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller burst")
    parser.add_argument("--threads", type=int, default=0, help="compute threads (0: torch's own)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    import torch

    from radixkv.service.engine.loading import choose_dtype, resolve_model

    path = str(resolve_model("smollm2"))
    dtype = str(choose_dtype(args.dtype, torch.device("cpu"))).removeprefix("torch.")
    rounds, requests, shared, tokens = (3, 8, 512, 48) if args.quick else (5, 32, 1024, 96)
    flags = ["--dtype", dtype] + (["--num-threads", str(args.threads)] if args.threads else [])

    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dtype": dtype,
        "threads": args.threads or os.cpu_count(),
        "burst_requests": requests,
        "burst_shared": shared,
    }
    with console.status("with the prefix cache"), server(*flags) as url:
        result["ttft"] = asyncio.run(ttft(url, rounds))
        result["burst"] = asyncio.run(burst(url, requests, shared))
        ours = asyncio.run(decode(url, rounds, tokens))
    with console.status("transformers.generate"):
        theirs = transformers_decode(path, dtype, args.threads, rounds, tokens)
    with console.status("without the prefix cache"), server(*flags, "--no-prefix-cache") as url:
        result["burst_without_cache"] = asyncio.run(burst(url, requests, shared))
    result["decode"] = {
        "tokens_per_s": ours,
        "transformers_tokens_per_s": theirs,
        "over_transformers": ours / theirs,
    }
    with_cache, without = result["burst"], result["burst_without_cache"]
    result["burst_wall_over_without_cache"] = with_cache["wall_s"] / without["wall_s"]

    table = Table(title=f"SmolLM2-135M, {dtype}, {result['threads']} threads, {result['machine']}")
    for column in ("what", "with cache", "compared with", "ratio", "wanted"):
        table.add_column(column)
    times = result["ttft"]
    table.add_row(
        "TTFT, 1,024 tokens, 1,000 cached",
        f"{times['warm_ms']:.0f} ms",
        f"cold {times['cold_ms']:.0f} ms",
        f"{times['warm_over_cold']:.3f}",
        "<= 0.10",
    )
    table.add_row(
        f"{requests} x [{shared:,} shared + 32] -> 32, wall",
        f"{with_cache['wall_s']:.1f} s",
        f"no cache {without['wall_s']:.1f} s",
        f"{result['burst_wall_over_without_cache']:.3f}",
        "<= 0.20",
    )
    most = shared + requests * 32 + requests * 16
    table.add_row(
        "prompt tokens computed in it",
        f"{with_cache['prompt_tokens_computed']:,.0f}",
        f"sent {with_cache['prompt_tokens']:,.0f}",
        f"{with_cache['prompt_tokens_computed'] / with_cache['prompt_tokens']:.3f}",
        f"<= {most:,} tokens",
    )
    table.add_row(
        "single-stream decode",
        f"{ours:.1f} tok/s",
        f"transformers {theirs:.1f} tok/s",
        f"{ours / theirs:.2f}",
        ">= 1",
    )
    Console().print(table)
    text = json.dumps(result)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
