"""What a step costs under LoRA adapters: 32 sequences that decode, and a prefill of 512 tokens.

    python examples/bench/bench_adapters.py [--rank 16] [--steps 40] [--decoder native|generic]
                                            [--threads N] [--cpu-time] [--output FILE.json]

Each case is the same step of SmolLM2 with its rows under no adapter, one, or four; the cases take
turns, so that a busy moment of the machine falls on all of them alike; on one that others use too,
--cpu-time counts the processor time of a single thread instead. Adapters are random, of all
seven projections of every layer: what they answer means nothing, what they cost is what any costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from radixkv.kernels.native_adapters import PARTS
from radixkv.service.engine.adapters import Adapter, by_adapter, fit
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from radixkv.service.engine.peft import read_peft
from radixkv.service.engine.runner import ModelRunner

BLOCK = 16
ROWS, CONTEXT, PREFILL = 32, 256, 512


def save_random(folder: Path, model: Any, rank: int, seed: int) -> None:
    """Write an adapter of all projections as PEFT would."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in PARTS:
            for name, shape in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            ):
                key = f"base_model.model.{path}.lora_{name}.weight"
                tensors[key] = 0.01 * torch.randn(shape, generator=generator)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(PARTS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def step(lens: Sequence[int], before: int, adapters: Sequence[Adapter | None]) -> StepBatch:
    """A step of sequences that each have ``before`` tokens and get ``lens`` more."""
    rng = np.random.default_rng(0)
    blocks = -(-(before + max(lens)) // BLOCK)
    works = by_adapter(list(adapters), lambda adapter: adapter)  # as the engine orders them
    return StepBatch(
        token_ids=rng.integers(3, 40000, sum(lens)),
        query_lens=np.array(lens, np.int32),
        kv_lens=np.array(lens, np.int32) + before,
        block_tables=np.arange(len(lens) * blocks, dtype=np.int32).reshape(len(lens), -1),
        logit_rows=np.cumsum(lens) - 1,
        adapters=works if any(works) else (),
    )


def cases_of(adapters: list[Adapter]) -> dict[str, StepBatch]:
    """The steps to compare, by name; the first of each kind has no adapter."""
    nothing: list[Adapter | None] = [None] * ROWS
    half: list[Adapter | None] = [adapters[i // 2 % 4] if i % 2 else None for i in range(ROWS)]
    decodes: dict[str, Sequence[Adapter | None]] = {
        "32 rows, no adapter": nothing,
        "32 rows, 1 adapter": [adapters[0]] * ROWS,
        "32 rows, 4 adapters": [adapters[i % 4] for i in range(ROWS)],
        "32 rows, half under 4 adapters": half,
    }
    found = {name: step([1] * ROWS, CONTEXT, given) for name, given in decodes.items()}
    found["1 row, no adapter"] = step([1], CONTEXT, [None])
    found["1 row, 1 adapter"] = step([1], CONTEXT, [adapters[0]])
    found["prefill of 512, no adapter"] = step([PREFILL], 0, [None])
    found["prefill of 512, 1 adapter"] = step([PREFILL], 0, [adapters[0]])
    return found


def measure(
    runner: ModelRunner, cases: dict[str, StepBatch], steps: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each case."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(steps + 3):
        for name, batch in cases.items():
            if name.startswith("prefill") and turn % 4:
                continue
            began = clock()
            runner.forward(batch)
            if turn >= 3:
                times[name].append(1e3 * (clock() - began))
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def load(decoder: str) -> LoadedModel:
    """SmolLM2 in float32 on the CPU."""
    path = resolve_model("smollm2")
    return load_model(path, name="smollm2", dtype="float32", device="cpu", decoder=decoder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--decoder", choices=("native", "generic"), default="native")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    torch.set_num_threads(args.threads)
    loaded = load(args.decoder)
    with tempfile.TemporaryDirectory() as folder:
        adapters = []
        for i in range(4):
            save_random(Path(folder, str(i)), loaded.model, args.rank, i)
            adapters.append(fit(read_peft(Path(folder, str(i))), loaded, name=str(i)))
    blocks = max(ROWS * -(-(CONTEXT + 1) // BLOCK), PREFILL // BLOCK)
    runner = ModelRunner(loaded, blocks, BLOCK)
    runner.pool.data.zero_()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    figures = measure(runner, cases_of(adapters), args.steps, clock)
    kind = "processor time" if args.cpu_time else "time"
    print(
        f"{args.decoder} decoder, rank {args.rank}, threads: {args.threads}; median {kind} a step"
    )
    base = 1.0
    for name, ms in figures.items():
        base = ms if name.endswith("no adapter") else base
        print(f"  {name:34s} {ms:9.2f} ms   x {ms / base:.3f}")
    if args.output is not None:
        about = {name: getattr(args, name) for name in ("decoder", "rank", "threads", "cpu_time")}
        args.output.write_text(json.dumps(about | {"ms": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
