"""Drives radixkv.Engine in its own process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from examples.bench.engine.drivers.protocol import answer, serve

engine: Any = None


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    global engine
    from radixkv import Engine, __version__

    engine = Engine(
        request["model"],
        num_threads=request["threads"],
        kv_memory=request["kv_bytes"],
        dtype=request.get("dtype") or "auto",
        max_num_seqs=64,
    )
    return {"version": __version__, "precision": engine.dtype}


def generate(request: Mapping[str, Any]) -> dict[str, Any]:
    tokens = request["tokens"]
    started, clock = time.perf_counter(), time.monotonic()
    streams = [
        engine.stream_generate(prompt, temperature=0, max_tokens=tokens, ignore_eos=True)
        for prompt in request["prompts"]
    ]
    results = [stream.result() for stream in streams]
    wall_s = time.perf_counter() - started
    return answer(
        wall_s,
        [stream.first_token_s - clock for stream in streams],
        [list(result.token_ids) for result in results],
        [result.usage.cached_tokens for result in results],
    )


def step_share(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time whole turns of the engine thread and the model's part, where all of a batch decodes."""
    core = engine._core
    runner, turn = core.runner, core.turn
    model_s: list[float] = []
    rows: list[int] = []
    steps: list[tuple[float, float]] = []

    class Timed:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def forward(self, batch: Any) -> Any:
            began = time.perf_counter()
            logits = runner.forward(batch)
            model_s.append(time.perf_counter() - began)
            rows.append(batch.num_tokens if len(batch.query_lens) == batch.num_tokens else 0)
            return logits

    def timed_turn() -> None:
        before, began = len(model_s), time.perf_counter()
        turn()
        if len(model_s) > before and rows[-1] == len(request["prompts"]):
            steps.append((time.perf_counter() - began, model_s[-1]))

    core.runner, core.turn = Timed(), timed_turn
    try:
        generate(request)
    finally:
        core.runner, core.turn = runner, turn
    return {"turn_s": [whole for whole, _ in steps], "model_s": [model for _, model in steps]}


if __name__ == "__main__":
    serve({"start": start, "generate": generate, "step_share": step_share})
