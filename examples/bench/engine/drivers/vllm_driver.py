"""Drives vLLM's engine on the CPU, in process: adds requests and makes steps as its server does.

On a CPU without bf16 units its bf16 matrices have no oneDNN kernel, so there it runs in float32.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from examples.bench.engine.drivers.protocol import answer, serve

engine: Any = None
requests = 0


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    global engine
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, request["kv_bytes"] >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = importlib.import_module("vllm")
    torch = importlib.import_module("torch")
    torch.set_num_threads(request["threads"])
    dtype = request.get("precision") or "float32"
    model = vllm.LLM(
        model=request["model"],
        dtype=dtype,
        max_model_len=request["max_model_len"],
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
        enforce_eager=bool(request.get("eager")),
        generation_config="vllm",
    )
    engine = model.llm_engine
    mode = "eager" if request.get("eager") else "compiled"
    return {"version": vllm.__version__.split("+")[0], "precision": f"{dtype}, {mode}"}


def generate(request: Mapping[str, Any]) -> dict[str, Any]:
    global requests
    vllm = importlib.import_module("vllm")
    prompt_type = importlib.import_module("vllm.inputs").TokensPrompt
    params = vllm.SamplingParams(
        temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=True
    )
    number: dict[str, int] = {}
    ids: list[list[int]] = [[] for _ in request["prompts"]]
    first: list[float | None] = [None] * len(ids)
    cached = [0] * len(ids)
    started = time.perf_counter()
    for i, prompt in enumerate(request["prompts"]):
        requests += 1
        number[str(requests)] = i
        engine.add_request(str(requests), prompt_type(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            i = number[output.request_id.split("-")[0]]
            if output.outputs and output.outputs[0].token_ids:
                ids[i] = list(output.outputs[0].token_ids)
                first[i] = now if first[i] is None else first[i]
            cached[i] = output.num_cached_tokens or cached[i]
    wall_s = time.perf_counter() - started
    return answer(wall_s, [wall_s if at is None else at for at in first], ids, cached)


if __name__ == "__main__":
    serve({"start": start, "generate": generate})
