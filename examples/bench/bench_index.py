"""How fast the cache's index is, against the floor: one memcmp of the same tokens, cold.

    python examples/bench/bench_index.py [--quick]

Prints one JSON line a workload and last a summary with every ratio. Times are microseconds per
operation through the public API (PrefixCache, BlockTable), each the best pass of several, as is the
floor: what is above it is other people's work. Cold: each pass
rotates over enough distinct prompts that none is in the processor's cache when its turn comes, for
the floor and for the look-ups alike. The machine's own speed is in the floor: compare ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity
from radixkv.table import BlockTable

BLOCK = 16
BLOCK_BYTES = 4 * BLOCK
COLD_BYTES = 96 << 20  # what a pass walks over; well beyond the last-level cache
MODEL = CacheIdentity.local("bench", BLOCK)

# Time of this process on the processor: on a quiet machine the same as time on the wall, and on a
# busy one not that of others.
clock = time.process_time

Result = dict[str, Any]


def say(result: Result) -> Result:
    print(json.dumps(result), flush=True)
    return result


def prompts(num: int, num_tokens: int, rng: random.Random) -> list[bytes]:
    """Distinct token bytes, ids below 2**17 or so as real ones are."""
    out = []
    for _ in range(num):
        words = bytearray(rng.randbytes(4 * num_tokens))
        words[0::4] = bytes(num_tokens)
        words[1::4] = bytes(num_tokens)
        out.append(bytes(words))
    return out


def per_op(operation: Callable[[Any], object], items: Sequence[Any], passes: int) -> float:
    """Microseconds that one operation takes in the best of the passes, the loop included."""
    times = []
    for _ in range(passes):
        start = clock()
        for item in items:
            operation(item)
        times.append((clock() - start) / len(items) * 1e6)
    return min(times)


def put(cache: PrefixCache, tokens: bytes) -> None:
    """One sequence from acquire to release, all of it computed in no time."""
    with cache.open(cache.acquire(MODEL, tokens)) as table:
        missing = len(tokens) // 4 - table.num_tokens
        table.reserve(missing)
        table.commit(missing)
        table.publish(tokens)


def look_up(num_tokens: int, passes: int, rng: random.Random) -> Result:
    """Full hits, hits that diverge in the middle of an edge, and the floor, on cold prompts."""
    size = 4 * num_tokens
    num = max(16, COLD_BYTES // (2 * size))
    stored = prompts(num, num_tokens, rng)
    # Copies, so that the query is other memory than the key in the tree; one token more, so that
    # the whole of what is stored may be found.
    queries = [bytes(bytearray(p) + b"\0\0\0\1") for p in stored]
    cut = size // 2 + 20
    diverging = [q[:cut] + b"\0\7\7\7" + q[cut + 4 :] for q in queries]
    pairs = [(bytes(bytearray(p)), p) for p in stored]
    cache = PrefixCache(num * (num_tokens // BLOCK), BLOCK)
    for tokens in stored:
        put(cache, tokens)
    assert cache.lookup(MODEL, queries[0]) == num_tokens
    assert cache.lookup(MODEL, diverging[0]) == cut // 4

    def hold(query: bytes) -> None:
        cache.acquire(MODEL, query).release()

    def full(query: bytes) -> None:
        cache.lookup(MODEL, query)

    gc.collect()
    floor = per_op(lambda pair: pair[0] == pair[1], pairs, passes)
    del pairs
    result = {
        "workload": f"look-up {num_tokens // 1024}k",
        "floor_us": floor,
        "full_us": per_op(full, queries, passes),
        "diverge_us": per_op(full, diverging, passes),
        "hold_and_release_us": per_op(hold, queries, passes),
    }
    return say({k: round(v, 2) if isinstance(v, float) else v for k, v in result.items()})


def insert(passes: int, rng: random.Random) -> Result:
    """Publish 1k tokens behind 2k resident ones: what a turn of a conversation adds."""
    num = 200
    cache = PrefixCache(num * 192, BLOCK)
    times = []
    for _ in range(passes):
        cache.reset()
        texts = prompts(num, 3072, rng)
        tables = []
        for tokens in texts:
            put(cache, tokens[: 4 * 2048])
            table = cache.open(cache.acquire(MODEL, tokens))
            table.reserve(1024)
            table.commit(1024)
            tables.append(table)
        start = clock()
        for table, tokens in zip(tables, texts, strict=True):
            table.publish(tokens)
        times.append((clock() - start) / num * 1e6)
        for table in tables:
            table.release()
    return say({"workload": "insert +1k after 2k", "us": round(min(times), 2)})


def scale(num_blocks: int, passes: int, rng: random.Random) -> Result:
    """A full pool of 8-block leaves: look one up, add one, evict one block at a time."""
    num = num_blocks // 8
    cache = PrefixCache(num * 8, BLOCK)
    start = clock()
    stored = prompts(num, 8 * BLOCK, rng)
    made = clock() - start
    start = clock()
    for tokens in stored:
        put(cache, tokens)
    fill = (clock() - start) / num * 1e6
    queries = [bytes(bytearray(rng.choice(stored)) + b"\0\0\0\1") for _ in range(4000)]
    full = per_op(lambda query: cache.lookup(MODEL, query), queries, passes)
    del stored, queries
    evictions, publishes = [], []
    for _ in range(passes):
        fresh = prompts(500, 8 * BLOCK, rng)
        evicting = publishing = 0.0
        for tokens in fresh:
            table = cache.open(cache.acquire(MODEL, tokens))
            start = clock()
            while table.num_tokens < 8 * BLOCK:
                step = BLOCK - table.num_tokens % BLOCK  # a token may be shared by chance
                table.reserve(step)  # nothing is free: each evicts one block and takes it
                table.commit(step)
            evicting += clock() - start
            start = clock()
            table.publish(tokens)
            publishing += clock() - start
            table.release()
        evictions.append(evicting / len(fresh) / 8 * 1e6)
        publishes.append(publishing / len(fresh) * 1e6)
    pause = clock()
    gc.collect()
    pause = clock() - pause
    assert cache.available == cache.num_blocks
    return say(
        {
            "workload": f"scale {num_blocks}",
            "look_up_128_us": round(full, 2),
            "evict_one_us": round(min(evictions), 2),
            "insert_128_us": round(min(publishes), 2),
            "fill_us": round(fill, 2),
            "full_gc_ms": round(pause * 1e3, 1),
            "made_s": round(made, 1),
        }
    )


def conversations(num: int, turns: int, rng: random.Random) -> tuple[list[bytes], int]:
    """Requests in order of arrival, and how many blocks they would fill if none ever went.

    ``num`` conversations under 20 system prompts of 500 tokens; each turn adds 200 tokens to what
    was said. Whose turn is next is drawn at random.
    """
    systems = prompts(20, 500, rng)
    said = [rng.choice(systems) for _ in range(num)]
    order = [i for i in range(num) for _ in range(turns)]
    rng.shuffle(order)
    requests = []
    for i in order:
        said[i] += prompts(1, 200, rng)[0]
        requests.append(said[i])
    unique = {text[:end] for text in said for end in (500 // BLOCK * BLOCK_BYTES,)}
    shared = len(unique) * (500 // BLOCK)
    own = num * ((500 + 200 * turns) // BLOCK - 500 // BLOCK)
    return requests, shared + own


def life_cycle(requests: Iterable[bytes], capacity: int, tail: bool) -> tuple[float, PrefixCache]:
    """Run the requests, 32 in flight; return seconds and the cache as it is then."""
    cache = PrefixCache(capacity, BLOCK)
    running: deque[tuple[BlockTable, bytes, int]] = deque()

    def finish() -> None:
        table, tokens, missing = running.popleft()
        table.commit(missing)
        table.publish(tokens, tail=tail)
        table.release()

    start = clock()
    for tokens in requests:
        if len(running) == 32:
            finish()
        table = cache.open(cache.acquire(MODEL, tokens))
        missing = len(tokens) // 4 - table.num_tokens
        table.reserve(missing)
        running.append((table, tokens, missing))
    while running:
        finish()
    seconds = clock() - start
    assert cache.available == capacity
    return seconds, cache


def live(quick: bool, rng: random.Random) -> Result:
    """1,000 conversations x 8 turns x 200 tokens, a quarter of their blocks, 32 in flight."""
    requests, unique = conversations(1000, 8, rng)
    capacity = unique // 4
    rates, with_tails = [], []
    for _ in range(3 if quick else 7):
        gc.collect()
        seconds, cache = life_cycle(requests, capacity, tail=False)
        rates.append(len(requests) / seconds)
        seconds, tailed = life_cycle(requests, capacity, tail=True)
        with_tails.append(len(requests) / seconds)
    assert cache.check() == []
    stats = cache.stats()
    return say(
        {
            "workload": "life cycle",
            "requests_per_s": round(max(rates)),
            "us": round(1e6 / max(rates), 1),
            "with_tails_per_s": round(max(with_tails)),
            "hit_rate": round(stats.hit_tokens / stats.queried_tokens, 3),
            "hit_rate_with_tails": round(tailed.stats().hit_tokens / stats.queried_tokens, 3),
            "capacity_blocks": capacity,
        }
    )


def memory(rng: random.Random) -> Result:
    """Bytes of index per resident block, tokens included, as Python's allocator counts them."""
    result: Result = {"workload": "memory", "tokens_bytes_per_block": BLOCK_BYTES}
    for name, num, num_tokens in (("leaves_of_8", 12_500, 128), ("leaves_of_128", 780, 2048)):
        gc.collect()
        tracemalloc.start()
        cache = PrefixCache(num * num_tokens // BLOCK, BLOCK)
        for _ in range(num):
            put(cache, prompts(1, num_tokens, rng)[0])
        gc.collect()
        result[f"{name}_bytes_per_block"] = round(
            tracemalloc.get_traced_memory()[0] / cache.cached_blocks, 1
        )
        tracemalloc.stop()
    requests, unique = conversations(1000, 8, rng)
    tracemalloc.start()
    _, cache = life_cycle((bytes(bytearray(r)) for r in requests), unique // 4, tail=True)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    result["conversations_bytes_per_block"] = round(used / cache.cached_blocks, 1)
    return say(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer passes; under 50 s")
    quick = parser.parse_args().quick
    rng = random.Random(7)
    passes = 3 if quick else 7
    looks = {n: look_up(n * 1024, passes, rng) for n in (2, 32, 128)}
    inserted = insert(passes, rng)
    scales = [scale(n, passes, rng) for n in (10_000, 100_000, 1_000_000)]
    lived = live(quick, rng)
    used = memory(rng)
    floor = looks[2]["floor_us"]
    summary: Result = {"summary": "ratios to the cold memcmp of the same run", "floor_2k_us": floor}
    for n, look in looks.items():
        for kind in ("full", "diverge", "hold_and_release"):
            summary[f"{kind}_{n}k"] = round(look[f"{kind}_us"] / look["floor_us"], 2)
    summary |= {
        "insert_1k": round(inserted["us"] / floor, 2),
        "evict_one_100k": round(scales[1]["evict_one_us"] / floor, 2),
        "life_cycle": round(lived["us"] / floor, 2),
        "life_cycle_per_s": lived["requests_per_s"],
        "life_cycle_per_s_at_floor_1.05": round(lived["requests_per_s"] * floor / 1.05),
        "evict_1M_over_10k": round(scales[2]["evict_one_us"] / scales[0]["evict_one_us"], 2),
        "look_up_1M_over_10k": round(scales[2]["look_up_128_us"] / scales[0]["look_up_128_us"], 2),
        "insert_1M_over_10k": round(scales[2]["insert_128_us"] / scales[0]["insert_128_us"], 2),
        "bytes_per_block": used["leaves_of_8_bytes_per_block"],
    }
    say(summary)


if __name__ == "__main__":
    main()
