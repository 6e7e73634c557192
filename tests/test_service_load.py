"""Many clients at once over HTTP: nothing is lost, mixed up or left behind."""

from __future__ import annotations

import asyncio
import random

import openai

from tests.http_server import RunningServer, running_server

WORDS = [
    "the",
    "hello",
    "and",
    "you",
    "system",
    "user",
    "assistant",
    "to",
    "of",
    "is",
    "in",
    "on",
    "with",
    "a",
    "bee",
    "sees",
    "one",
    "more",
]


def text(num_words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def hits_and_queries(server: RunningServer) -> tuple[int, int]:
    found: dict[str, int] = {}
    for line in str(server.ask("GET", "/metrics")[2]).splitlines():
        for name in ("prefix_cache_hits_total", "prefix_cache_queries_total"):
            if line.startswith(f"radixkv:{name}"):
                found[name] = int(float(line.rsplit(" ", 1)[1]))
    return found["prefix_cache_hits_total"], found["prefix_cache_queries_total"]


async def chat(client: openai.AsyncOpenAI, seed: int, leave_after: int | None) -> tuple[int, int]:
    """Stream one chat; returns (prompt tokens, cached tokens), zeros if it left early."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": text(40, seed % 3)},
            {"role": "user", "content": text(5, seed)},
        ],
        max_tokens=10 + seed % 20,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    ids, finishes, usage = set(), 0, None
    async with stream:
        chunks = 0
        async for chunk in stream:
            ids.add(chunk.id)
            finishes += sum(choice.finish_reason is not None for choice in chunk.choices)
            usage = chunk.usage or usage
            chunks += 1
            if leave_after is not None and chunks > leave_after:
                return 0, 0
    assert len(ids) == 1 and finishes == 1
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def test_sixty_four_streams_then_as_many_that_hang_up() -> None:
    """METRICS-1, METRICS-2, LEAK-1, LEAK-5: what clients were told adds up to the counters."""

    async def wave(leavers: random.Random | None) -> list[tuple[int, int]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            leave = [
                leavers.randrange(0, 12) if leavers and leavers.random() < 0.6 else None
                for _ in range(64)
            ]
            return await asyncio.gather(*(chat(client, i, leave[i]) for i in range(64)))

    with running_server() as server:
        told = asyncio.run(wave(None))
        hits, queries = hits_and_queries(server)
        assert sum(cached for _, cached in told) == hits
        assert sum(prompt for prompt, _ in told) == queries
        server.wait_until(server.at_rest)

        asyncio.run(wave(random.Random(1)))
        server.wait_until(server.at_rest)
        more_hits, more_queries = hits_and_queries(server)
        assert hits <= more_hits <= more_queries
        stats = server.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        assert server.engine.check() == []
        assert stats.violations_total == 0


def test_forty_conversations_in_a_pool_for_three_all_end_and_never_mix() -> None:
    """SECURITY-7 and SCHED-1, over HTTP: each answer is the one its prompt has when alone."""

    async def converse(url: str, at_once: int) -> list[str]:
        gate = asyncio.Semaphore(at_once)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(i: int) -> str:
                answers = []
                messages: list[openai.types.chat.ChatCompletionMessageParam] = []
                for turn in range(2):
                    async with gate:
                        messages.append(
                            {"role": "user", "content": f"marker {i} {text(12, 100 * i + turn)}"}
                        )
                        reply = await client.chat.completions.create(
                            model="tiny",
                            messages=messages,
                            max_tokens=16,
                            temperature=0,
                            extra_body={"ignore_eos": True},
                        )
                    answer = reply.choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": answer})
                    answers.append(answer)
                return "|".join(answers)

            return await asyncio.gather(*(one(i) for i in range(40)))

    with running_server() as roomy:
        expected = asyncio.run(converse(roomy.url, 1))
        per_block = 8 * 2**20 // roomy.engine.stats().num_blocks
    blocks = 3 * 13  # a conversation ends at some 200 tokens of 16 a block
    with running_server(kv_memory=blocks * per_block, lookahead_tokens=0) as small:
        assert asyncio.run(converse(small.url, 8)) == expected
        small.wait_until(small.at_rest)
        assert small.engine.stats().cache.evicted_blocks > 0
        assert small.engine.check() == []
