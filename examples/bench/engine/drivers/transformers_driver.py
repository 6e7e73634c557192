"""Drives transformers eagerly, a batch of equal prompts at a time, keeping one prefix by hand.

What a careful user of the library writes: the last single prompt's cache is kept, cut back to what
the next prompts have in common with it and repeated over the batch. No scheduling, no streaming.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Mapping
from typing import Any

from examples.bench.engine.drivers.protocol import answer, serve

model: Any = None
torch: Any = None
kept: tuple[list[int], Any] = ([], None)


def start(request: Mapping[str, Any]) -> dict[str, Any]:
    global model, torch
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(request["threads"])
    torch.set_grad_enabled(False)
    dtype = request.get("precision") or "float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=getattr(torch, dtype), local_files_only=True
    ).eval()
    return {"version": transformers.__version__, "precision": f"{dtype}, eager"}


def generate(request: Mapping[str, Any]) -> dict[str, Any]:
    global kept
    cache_type = importlib.import_module("transformers").DynamicCache
    prompts, tokens = request["prompts"], request["tokens"]
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("this driver takes prompts of one length")
    started = time.perf_counter()
    have, cache = kept
    shared = min(common(have, prompts), len(prompts[0]) - 1)
    if cache is None or shared < 16:
        shared, cache = 0, cache_type(config=model.config)
    else:
        cache = copy.deepcopy(cache) if len(prompts) > 1 else cache
        if beyond := cache.get_seq_length() - shared:
            cache.crop(-beyond)
        if len(prompts) > 1:
            cache.batch_repeat_interleave(len(prompts))
    last = torch.tensor([prompt[shared:] for prompt in prompts])
    ids = []
    ttft_s = 0.0
    for _ in range(tokens):
        logits = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        last = logits[:, -1:].argmax(-1)
        ids.append(last[:, 0].tolist())
        ttft_s = ttft_s or time.perf_counter() - started
    wall_s = time.perf_counter() - started
    if len(prompts) == 1:
        kept = (prompts[0] + [row[0] for row in ids][:-1], cache)
    return answer(
        wall_s, [ttft_s] * len(prompts), [list(row) for row in zip(*ids, strict=True)],
        [shared] * len(prompts),
    )  # fmt: skip


def common(have: list[int], prompts: list[list[int]]) -> int:
    """How many leading tokens ``have`` and all of ``prompts`` share."""
    count = 0
    for column in zip(have, *prompts, strict=False):
        if len(set(column)) != 1:
            break
        count += 1
    return count


if __name__ == "__main__":
    serve({"start": start, "generate": generate})
