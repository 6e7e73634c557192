"""What the machine can do at most, and what that allows an engine; knows nothing of engines.

    python -m examples.bench.engine.floors THREADS    prints {"read_gb_s": ..., "gemm_gflop_s": ...}

A bound is the larger of two times: every byte read once at the memory's speed, every operation done
at the speed of a large matrix product. Weights count 2 bytes (bfloat16, as they are published),
keys and values 2 as well; a prefix that several requests share is computed and read once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

BYTES = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds, each the best of several tries with all threads."""

    read_gb_s: float
    gemm_gflop_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-family model."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def body(self) -> int:
        """Weights that every token passes."""
        attention = self.hidden * self.head_dim * 2 * (self.q_heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head(self) -> int:
        """Weights that a token passes when its logits are wanted."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


SMOLLM2 = Shape(layers=30, hidden=576, inner=1536, q_heads=9, kv_heads=3, head_dim=64, vocab=49152)


def prefill_s(m: Machine, s: Shape, new: int, past: int = 0, requests: int = 1) -> float:
    """Bound on computing ``new`` tokens of each of ``requests`` after ``past`` cached ones that
    they share, up to their first token."""
    pairs = requests * (new * past + new * (new + 1) / 2)
    flop: float = 2 * requests * (s.body * new + s.head)
    flop += 4 * s.layers * s.q_heads * s.head_dim * pairs
    read = (s.body + s.head) * BYTES + past * s.kv_bytes
    return max(flop / m.gemm_gflop_s, read / m.read_gb_s) / 1e9


def decode_s(m: Machine, s: Shape, batch: int, steps: int, shared: int, own: int) -> float:
    """Bound on ``steps`` steps of ``batch`` sequences: ``shared`` tokens in common, ``own`` not."""
    total = 0.0
    for step in range(steps):
        length = own + step
        flop = 2 * (s.body + s.head) * batch
        flop += 4 * s.layers * s.q_heads * s.head_dim * batch * (shared + length)
        read = (s.body + s.head) * BYTES + (shared + batch * length) * s.kv_bytes
        total += max(flop / m.gemm_gflop_s, read / m.read_gb_s) / 1e9
    return total


def bounds(m: Machine, s: Shape = SMOLLM2) -> dict[str, float]:
    """The best possible figure of each row, in the row's unit."""

    def burst(requests: int, shared: int, own: int, out: int, primed: bool) -> float:
        first = 0.0 if primed else prefill_s(m, s, shared)
        own_s = prefill_s(m, s, own, shared, requests)
        return first + own_s + decode_s(m, s, requests, out - 1, shared, own)

    return {
        "a": 95 / decode_s(m, s, 1, 95, 0, 64),
        "b": 1024 / prefill_s(m, s, 1024),
        "c.cold": prefill_s(m, s, 1024) * 1e3,
        "c.warm": prefill_s(m, s, 24, 1000) * 1e3,
        "d": burst(32, 1024, 32, 32, primed=False),
        "w": burst(32, 1024, 32, 32, primed=True),
        "e": 32 * 64 / burst(32, 0, 128, 64, primed=True),
        "f": burst(64, 4096, 32, 64, primed=False),
    }


def measure(threads: int) -> Machine:
    """Measure this machine; takes about two seconds when it is quiet."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    long = torch.ones(64 << 20)  # 256 MiB, beyond any cache
    tall = long.view(-1, 1024)
    row = torch.ones(1024)
    read_s = min(_best(lambda: long.sum(), 5), _best(lambda: tall @ row, 5))
    speeds = []
    kinds = [torch.float32]
    if _has_bf16_units():
        kinds.append(torch.bfloat16)
    for kind in kinds:
        a = torch.ones(1024, 1024, dtype=kind)
        speeds.append(2 * 1024**3 / _best(lambda a=a: a @ a, 12))  # type: ignore[misc]
    return Machine(long.nbytes / read_s / 1e9, max(speeds) / 1e9)


def _has_bf16_units() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read()
    except OSError:
        return False
    return "avx512_bf16" in text or "amx_bf16" in text


def _best(run: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    found = measure(int(sys.argv[1]))
    print(json.dumps({"read_gb_s": found.read_gb_s, "gemm_gflop_s": found.gemm_gflop_s}))
