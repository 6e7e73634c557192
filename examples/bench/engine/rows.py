"""The rows of the comparison: what each asks of an engine and how its figure is made of the times.

Knows the drivers' ``generate`` and nothing of processes. Every prompt is of random tokens, fresh
for each round and the same for every engine; answers are greedy and of a fixed length.

a    decode, one stream            64 -> 96 tokens
b    prefill of 1,024 cold         both from the same rounds: a cold prompt, then
c    TTFT cold and warm            one that shares its first 1,000 tokens
d    32 x [1,024 + 32] -> 32       all at once, the shared part cold
w    the same                      the shared part asked for once before
e    32 x 128 -> 64                nothing shared
f    64 x [4,096 + 32] -> 64       all at once, the shared part cold
s    the share of a step of 32 that is not the model (radixkv alone)
t    TTFT over the cached share    of prompts of 1,024 and 4,096 tokens, for the plot
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

VOCAB = (1000, 40_000)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 1.0)
Figures = dict[str, Any]


class Generate(Protocol):
    """Asks an engine for ``tokens`` tokens of each prompt, all at once."""

    def __call__(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. ``scale`` divides all lengths and counts, for trying things out."""

    rounds: int = 3
    seconds: float = 40.0
    """No further round of a row begins after this long."""
    scale: int = 1

    def of(self, number: int) -> int:
        return max(2, number // self.scale)


@dataclass(slots=True)
class Asker:
    """Makes prompts and repeats; ``seed`` fixes them, ``say`` shows what is going on."""

    generate: Generate
    size: Size
    seed: int
    say: Callable[[str], None] = field(default=lambda _: None)

    def prompt(self, length: int, *key: int) -> list[int]:
        """``length`` tokens that depend on the seed and the key alone."""
        rng = random.Random(hash((self.seed, *key)))
        return [rng.randrange(*VOCAB) for _ in range(length)]

    def repeat(self, once: Callable[[int], Figures]) -> Figures:
        """The medians over rounds of each figure, and ``rounds``; at least one round is made."""
        found: list[Figures] = []
        started = time.perf_counter()
        while len(found) < self.size.rounds:
            found.append(once(len(found)))
            self.say(f"round {len(found)}: " + brief(found[-1]))
            if time.perf_counter() - started > self.size.seconds:
                break
        return {k: statistics.median(f[k] for f in found) for k in found[0]} | {
            "rounds": len(found)
        }


def brief(figures: Figures) -> str:
    return ", ".join(f"{k} {v:.4g}" for k, v in figures.items() if isinstance(v, float))


def decode(ask: Asker) -> Figures:
    """Row a."""
    tokens = ask.size.of(96)

    def once(i: int) -> Figures:
        done = ask.generate([ask.prompt(64, 1, i)], tokens)
        return {"tokens_per_s": (tokens - 1) / (done["wall_s"] - done["ttft_s"][0])}

    return ask.repeat(once)


def ttft(ask: Asker) -> Figures:
    """Rows b and c."""
    length, kept = ask.size.of(1024), ask.size.of(1000)

    def once(i: int) -> Figures:
        prompt = ask.prompt(length, 2, i)
        cold = ask.generate([prompt], 2)["ttft_s"][0]
        warm = ask.generate([prompt[:kept] + ask.prompt(length - kept, 3, i)], 2)["ttft_s"][0]
        return {
            "prefill_tokens_per_s": length / cold,
            "cold_ms": cold * 1e3,
            "warm_ms": warm * 1e3,
            "warm_over_cold": warm / cold,
        }

    return ask.repeat(once)


def burst(ask: Asker, key: int, requests: int, shared: int, out: int, primed: bool) -> Figures:
    """Rows d, w and f."""
    requests, shared, own, out = map(ask.size.of, (requests, shared, 32, out))

    def once(i: int) -> Figures:
        prefix = ask.prompt(shared, key, i)
        if primed:
            ask.generate([prefix], 2)
        prompts = [prefix + ask.prompt(own, key, i, n) for n in range(requests)]
        done = ask.generate(prompts, out)
        return {"wall_s": done["wall_s"], "last_first_token_s": max(done["ttft_s"])}

    return ask.repeat(once)


def unshared(ask: Asker) -> Figures:
    """Row e."""
    requests, length, out = map(ask.size.of, (32, 128, 64))

    def once(i: int) -> Figures:
        done = ask.generate([ask.prompt(length, 6, i, n) for n in range(requests)], out)
        return {"tokens_per_s": requests * out / done["wall_s"], "wall_s": done["wall_s"]}

    return ask.repeat(once)


def ttft_over_share(ask: Asker) -> Figures:
    """Row t: {"1024": [[share, ms], ...], "4096": ...}."""
    curves: Figures = {}
    for length in map(ask.size.of, (1024, 4096)):
        base = ask.prompt(length, 7, length)
        ask.generate([base], 2)
        curve = []
        for n, share in enumerate(SHARES):
            cut = round(share * length)
            prompt = base[:cut] + ask.prompt(length - cut, 8, length, n)
            curve.append([share, ask.generate([prompt], 2)["ttft_s"][0] * 1e3])
            ask.say(f"{length} tokens, {share:.0%} cached: {curve[-1][1]:.0f} ms")
        curves[str(length)] = curve
    return curves


MEASUREMENTS: dict[str, Callable[[Asker], Figures]] = {
    "a": decode,
    "bc": ttft,
    "d": lambda ask: burst(ask, 4, 32, 1024, 32, primed=False),
    "w": lambda ask: burst(ask, 5, 32, 1024, 32, primed=True),
    "e": unshared,
    "f": lambda ask: burst(ask, 9, 64, 4096, 64, primed=False),
    "t": ttft_over_share,
}
ORDER = ("a", "bc", "d", "w", "e", "s", "f", "t")


def wanted(only: str | None) -> list[str]:
    """The measurements that rows such as ``a,c,w`` need; all for None. Raises ValueError."""
    if only is None:
        return list(ORDER)
    names = {name.strip() for name in only.split(",")}
    unknown = names - set("abcdwefst")
    if unknown:
        raise ValueError(
            f"no row {', '.join(sorted(unknown))}; there are a, b, c, d, w, e, f, s, t"
        )
    return [group for group in ORDER if names & set(group)]


def step_share(turn_s: list[float], model_s: list[float]) -> Figures:
    """Row s of the times of steps; raises ValueError if there was none."""
    if not turn_s:
        raise ValueError("no step had all requests decoding")
    shares = [1 - model / turn for turn, model in zip(turn_s, model_s, strict=True)]
    return {
        "outside_share": statistics.median(shares),
        "step_ms": statistics.median(turn_s) * 1e3,
        "outside_ms": statistics.median(
            (turn - model) * 1e3 for turn, model in zip(turn_s, model_s, strict=True)
        ),
        "steps": len(shares),
    }
