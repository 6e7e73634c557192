"""What tenants cost each other, and what order and explanations cost the cache.

    python examples/bench/bench_tenants.py [--quick] [--threads N] [--output FILE.json]

(a) a quiet tenant's time to first token alone, and beside a loud one that sends all that it can;
(b) steps until a cold request starts among traffic of which nine in ten hit; (c) hit tokens of the
same requests under three orders; (d) look-ups alone, and with explanations between them. The engine
is in this process, SmolLM2-135M, answers greedy and of fixed length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from radixkv import CacheIdentity, Engine, PrefixCache
from radixkv.service.engine.waiting import MAX_SKIPS
from radixkv.tokens import encode

TURNS = 4
"""Of (a): alone and beside, each so often."""
EXPLAIN_EVERY = 10
"""Look-ups in (d) from one explanation to the next."""
LOUD_BEFORE_S = 8.0
"""So long the loud one has had the machine, and is known for it, when the quiet one comes."""
VOCAB = range(1000, 40_000)
console = Console(stderr=True)


def random_tokens(length: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.choice(VOCAB) for _ in range(length)]


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


@dataclass(frozen=True)
class Size:
    """How much of each part is done."""

    quiet_requests: int
    cold_trials: int
    ordered: int
    lookups: int


async def ttft_s(engine: Engine, prompt: list[int], tokens: int, tenant: str) -> float:
    """Send a request; return the seconds to its first token, once its answer is whole."""
    began = time.perf_counter()
    stream = engine.stream_generate(
        prompt, tenant=tenant, max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    first = None
    async for _ in stream:
        first = first or time.perf_counter() - began
    assert first is not None
    return first


async def quiet_and_loud(threads: int | None, size: Size) -> dict[str, Any]:
    """(a) One quiet client, which asks for a part of the half that is its due, alone and beside ten
    that never pause; with short steps, and with those that a CPU has by default."""
    cases = {
        "steps_of_64": (64, 384, 2.5, size.quiet_requests),
        "default_steps": (None, 1024, 4.0, size.quiet_requests * 2 // 3),
    }
    found = {}
    for name, (step_tokens, prompt_tokens, pause_s, requests) in cases.items():
        console.print(f"(a) {name}")
        with Engine(
            "smollm2", kv_memory="1GiB", max_batch_tokens=step_tokens, num_threads=threads
        ) as engine:
            engine.warm_up()
            found[name] = await beside_loud_ones(engine, prompt_tokens, pause_s, requests)
    return found


async def beside_loud_ones(
    engine: Engine, prompt_tokens: int, pause_s: float, requests: int
) -> dict[str, Any]:
    """Measure a client that pauses for ``pause_s`` between requests, alone and beside ten.

    In turns, so that whatever else the machine does falls on both.
    """
    served = 0

    async def quiet(turn: int) -> list[float]:
        times = []
        for i in range(max(1, requests // TURNS)):
            prompt = random_tokens(prompt_tokens, ("quiet", turn, i))
            times.append(await ttft_s(engine, prompt, 8, "quiet"))
            await asyncio.sleep(pause_s)
        return times

    async def loud(name: object, stop: asyncio.Event) -> None:
        nonlocal served
        sent = 0
        while not stop.is_set():
            await ttft_s(engine, random_tokens(prompt_tokens, ("loud", name, sent)), 8, "loud")
            served, sent = served + 1, sent + 1

    alone: list[float] = []
    beside: list[float] = []
    for turn in range(TURNS):
        console.print(f"turn {turn + 1} of {TURNS}")
        alone += await quiet(2 * turn)
        stop = asyncio.Event()
        clients = [asyncio.create_task(loud((turn, i), stop)) for i in range(10)]
        await asyncio.sleep(LOUD_BEFORE_S)
        beside += await quiet(2 * turn + 1)
        stop.set()
        await asyncio.gather(*clients)  # so that nothing runs beside what is alone
    return {
        "prompt_tokens": prompt_tokens,
        "alone_p95_ms": 1000 * p95(alone),
        "beside_p95_ms": 1000 * p95(beside),
        "alone_median_ms": 1000 * statistics.median(alone),
        "beside_median_ms": 1000 * statistics.median(beside),
        "ratio_p95": p95(beside) / p95(alone),
        "ratio_median": statistics.median(beside) / statistics.median(alone),
        "quiet_requests": len(alone) + len(beside),
        "loud_requests": served,
    }


async def cold_among_hot(threads: int | None, size: Size) -> dict[str, Any]:
    """(b) Steps from sending a cold request to its first token, while nine in ten others hit."""
    with Engine("smollm2", kv_memory="512MiB", max_num_seqs=8, num_threads=threads) as engine:
        hot = random_tokens(256, "hot")
        engine.generate(hot, max_tokens=1, temperature=0.0)
        stop = asyncio.Event()

        async def traffic(client: int) -> None:
            turn = 0
            while not stop.is_set():
                own = random_tokens(16, ("hot", client, turn))
                prompt = own * 8 if turn % 10 == 9 else hot + own
                await ttft_s(engine, prompt, 8, "local")
                turn += 1

        clients = [asyncio.create_task(traffic(i)) for i in range(24)]
        await asyncio.sleep(1.0)
        steps = []
        for i in range(size.cold_trials):
            before = engine.stats().steps_total
            await ttft_s(engine, random_tokens(128, ("cold", i)), 1, "local")
            steps.append(engine.stats().steps_total - before)
        stop.set()
        await asyncio.gather(*clients)
    return {
        "steps_median": statistics.median(steps),
        "steps_most": max(steps),
        "may_be_passed_over": MAX_SKIPS,
    }


async def orders(threads: int | None, size: Size) -> dict[str, Any]:
    """(c) Hit tokens of the same requests, first come first served, fair, and by priority."""
    rng = random.Random(7)
    prefixes = [random_tokens(192, ("prefix", i)) for i in range(8)]
    requests = [
        (f"t{rng.randrange(4)}", prefixes[rng.randrange(8)] + random_tokens(24, ("own", i)))
        for i in range(size.ordered)
    ]
    found = {}
    for order in ("fcfs", "fair", "priority"):
        with Engine("smollm2", kv_memory="512MiB", max_num_seqs=8, num_threads=threads) as engine:

            async def one(order: str, i: int, tenant: str, prompt: list[int]) -> int:
                # The salt keeps the tenants' caches apart where they are one tenant to the queue,
                # so that all three orders could find the same.
                who: dict[str, Any] = {"tenant": tenant}
                if order != "fair":
                    priority = i if order == "fcfs" else i * 7919 % 3
                    who = {"tenant": "one", "salt": tenant, "priority": priority}
                done = await engine.agenerate(
                    prompt, max_tokens=4, temperature=0.0, ignore_eos=True, **who
                )
                return done.usage.cached_tokens

            hits = await asyncio.gather(
                *(one(order, i, *request) for i, request in enumerate(requests))
            )
        found[order] = sum(hits)
    return {
        **{f"{order}_hit_tokens": hit for order, hit in found.items()},
        "least_over_most": min(found.values()) / max(found.values()),
        "prompt_tokens": sum(len(prompt) for _, prompt in requests),
    }


def explanations(size: Size) -> dict[str, Any]:
    """(d) A look-up of 2,048 tokens in a tree of 10k nodes, alone and between explanations."""
    rng = random.Random(3)
    cache, identity = PrefixCache(400_000, 16), CacheIdentity.local("bench")
    prompts: list[list[int]] = []
    for _ in range(2_500):
        start = rng.choice(prompts)[: 64 * rng.randrange(1, 60)] if len(prompts) > 99 else []
        prompts.append(start + [rng.choice(VOCAB) for _ in range(2048 - len(start))])
        with cache.open(cache.acquire(identity, encode(prompts[-1]))) as table:
            table.reserve(len(prompts[-1]) - table.num_tokens)
            table.commit(len(prompts[-1]) - table.num_tokens)
            table.publish(encode(prompts[-1]), tail=True)
    asked = [encode(rng.choice(prompts)) for _ in range(256)]
    # Each is looked up in each place behind an explanation; those far from one are as good as
    # alone, and what else the machine does falls on all of them.
    times: list[list[list[float]]] = [[[] for _ in asked] for _ in range(EXPLAIN_EVERY)]
    explain: list[float] = []
    for turn in range(size.lookups * EXPLAIN_EVERY):
        for i, tokens in enumerate(asked):
            place = (i + turn) % EXPLAIN_EVERY
            if place == 0:
                began = time.perf_counter()
                cache.explain(identity, tokens[:4000] + tokens[:400])
                explain.append(time.perf_counter() - began)
            began = time.perf_counter()
            cache.lookup(identity, tokens)
            times[place][i].append(time.perf_counter() - began)
    by_place = [statistics.mean(map(statistics.median, one)) for one in times]
    alone = statistics.mean(by_place[EXPLAIN_EVERY // 2 :])
    return {
        "nodes": cache.stats().nodes,
        "lookup_us": 1e6 * alone,
        "lookup_by_place_us": [1e6 * seconds for seconds in by_place],
        "added": statistics.mean(by_place) / alone - 1,
        "explain_us": 1e6 * statistics.median(explain),
    }


def show(results: dict[str, Any]) -> None:
    """Print what was measured beside what is wanted."""
    table = Table("", "measured", "wanted")
    a, b, c, d = (results.get(part) for part in "abcd")
    for name, one in (a or {}).items():
        table.add_row(
            f"(a) quiet p95 TTFT beside a loud tenant, {name.replace('_', ' ')}",
            f"{one['alone_p95_ms']:.0f} -> {one['beside_p95_ms']:.0f} ms: {one['ratio_p95']:.2f}x"
            f" (median {one['ratio_median']:.2f}x)",
            "at most 1.3x",
        )
    if b:
        table.add_row(
            "(b) steps until a cold request's first token",
            f"{b['steps_median']:.0f}, at most {b['steps_most']}",
            f"bounded: passed over {b['may_be_passed_over']} times at most",
        )
    if c:
        hits = [c[f"{order}_hit_tokens"] for order in ("fcfs", "fair", "priority")]
        table.add_row("(c) hit tokens: fcfs, fair, priority", f"{hits}", "within 5 %")
    if d:
        table.add_row(
            f"(d) look-up in {d['nodes']} nodes",
            f"{d['lookup_us']:.2f} us, between explanations {100 * d['added']:+.1f} %"
            f" (one takes {d['explain_us']:.0f} us)",
            "less than 1 %",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of everything")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="abcd", help="parts, such as bd")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    size = Size(4, 5, 48, 4) if args.quick else Size(24, 15, 128, 12)
    results: dict[str, Any] = {"machine": f"{platform.machine()} {platform.processor()}".strip()}
    for part in args.only:
        console.print(f"({part})")
        if part == "d":
            results[part] = explanations(size)
        else:
            measure = {"a": quiet_and_loud, "b": cold_among_hot, "c": orders}[part]
            results[part] = asyncio.run(measure(args.threads, size))
        if args.output:
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
