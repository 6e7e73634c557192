"""Drives OpenVINO GenAI's ContinuousBatchingPipeline over the float16 GGUF file.

Its reader takes no bfloat16 and no float32 file; float16 holds the same values, and it computes in
float32 where the CPU has no bf16 units. Keys and values are kept as float16: its default of 8 bits
is a quantised cache, and no other engine here has one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from examples.bench.engine.drivers.protocol import answer, serve

pipeline: Any = None
genai: Any = None
requests = 0


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    global pipeline, genai
    genai = importlib.import_module("openvino_genai")
    settings = genai.SchedulerConfig()
    settings.cache_size = max(1, request["kv_bytes"] >> 30)
    settings.enable_prefix_caching = True
    settings.max_num_batched_tokens = request.get("batch_tokens") or 512
    settings.max_num_seqs = 64
    properties = {
        "INFERENCE_PRECISION_HINT": request.get("precision") or "f32",
        "KV_CACHE_PRECISION": "f16",
        "INFERENCE_NUM_THREADS": request["threads"],
    }
    pipeline = genai.ContinuousBatchingPipeline(request["gguf_f16"], settings, "CPU", properties)
    hint = properties["INFERENCE_PRECISION_HINT"]
    return {
        "version": genai.__version__.split("-")[0],
        "precision": f"weights f16 (same values), computes {hint}, KV f16",
    }


def generate(request: Mapping[str, Any]) -> dict[str, Any]:
    global requests
    import numpy as np

    tensor = importlib.import_module("openvino").Tensor
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = request["tokens"], True, False
    prompts = [np.array([prompt], dtype=np.int64) for prompt in request["prompts"]]
    ids: list[list[int]] = [[] for _ in prompts]
    first: list[float | None] = [None] * len(prompts)
    started = time.perf_counter()
    handles = []
    for prompt in prompts:
        requests += 1
        handles.append(pipeline.add_request(requests, tensor(prompt), config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - started
        for i, handle in enumerate(handles):
            if handle.can_read():
                for output in handle.read().values():
                    ids[i] += output.generated_ids
                first[i] = now if first[i] is None else first[i]
    wall_s = time.perf_counter() - started
    return answer(wall_s, [wall_s if at is None else at for at in first], ids)


if __name__ == "__main__":
    serve({"start": start, "generate": generate})
