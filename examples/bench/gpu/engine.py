"""A whole engine on a GPU: right against transformers, then how long its decode steps take.

Random weights in the shape of an 8B Llama: the answers mean nothing, the times do. Knows models,
engines and batches; nothing of kernels.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.fusing import merge_projections
from radixkv.service.engine.graphs import GraphDevice
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, and what is asked of it."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    prompts: tuple[int, ...]  # tokens of each
    answer: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int


EXACT = Shape(1024, 2048, 16, 4, 64, 4, 4096, (5, 40, 130, 257, 300, 7, 64, 90), 48, (), (), 0)
"""In float32, small: every id must be transformers' own."""

LLAMA_8B = Shape(
    4096, 14336, 32, 8, 128, 32, 128256, (), 0, (1, 8, 32, 64), (1024, 4096), 20
)  # fmt: skip

DRY = Shape(64, 96, 4, 2, 16, 2, 300, (5, 40), 6, (1, 3), (40,), 2)
"""For a CPU: every line, none of the numbers."""


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Make a model of random weights, as it would be loaded for the generic path."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        initializer_range=0.2 if dtype == torch.float32 else 0.02,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    merge_projections(model)
    return LoadedModel.from_model(model.eval(), _tokenizer(), name="random", decoder="generic")


def _tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def compare_ids(shape: Shape, loaded: LoadedModel) -> Iterator[dict[str, Any]]:
    """Ask an engine with and without graphs, all prompts at once and again over the cache."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, shape.vocab, n).tolist() for n in shape.prompts]
    want = [_own_answer(loaded, prompt, shape.answer) for prompt in prompts]
    for setting in ("auto", "off"):
        with Engine(loaded, kv_memory="1GiB", cuda_graphs=setting) as engine:
            for turn in ("cold", "cached"):
                streams = [
                    engine.stream_generate(
                        p, max_tokens=shape.answer, temperature=0, ignore_eos=True
                    )
                    for p in prompts
                ]
                got = [list(stream.result().token_ids) for stream in streams]
                same = sum(a == b for a, b in zip(got, want, strict=True))
                yield {
                    "row": f"ids, graphs {setting}, {turn}",
                    "same": same,
                    "of": len(want),
                    "met": same == len(want),
                }


def _own_answer(loaded: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=loaded.device)
    with own_attention(loaded.model) as model, torch.inference_mode():
        out = model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def time_steps(
    shape: Shape, loaded: LoadedModel, graphs: GraphDevice | None
) -> Iterator[dict[str, Any]]:
    """Time decode steps, drawn greedily, with each kernel launched anew and as graphs, in turn."""
    most = max(shape.batches)
    width = max(shape.contexts) // BLOCK_SIZE + 2
    runners = {"eager": ModelRunner(loaded, most * width, BLOCK_SIZE, max_num_seqs=most)}
    if graphs is not None:
        runners["graph"] = ModelRunner(
            loaded, most * width, BLOCK_SIZE, graphs=graphs, max_num_seqs=most
        )
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    for runner in runners.values():
        runner.pool.data.normal_()
    for context in shape.contexts:
        for seqs in shape.batches:
            times: dict[str, list[float]] = {name: [] for name in runners}
            ids: dict[str, list[list[int]]] = {name: [] for name in runners}
            for step in range(shape.steps + 3):
                for name, runner in runners.items():
                    seconds, drawn = _one_step(runner, seqs, context, step, shape.vocab)
                    if step >= 3:  # the first compile, and record
                        times[name].append(seconds)
                        ids[name].append(drawn)
            row: dict[str, Any] = {"row": f"step {seqs} x {context}"}
            row["ms"] = {n: round(statistics.median(t) * 1e3, 3) for n, t in times.items()}
            row["weights_gb"] = round(weights / 1e9, 2)
            reason = runners["graph"].graphs if graphs is not None else None
            if reason is not None and reason.off is not None:
                row["note"] = f"not recorded: {reason.off}"
            if "graph" in ids:
                row["same_ids"] = _same(ids["eager"], ids["graph"])
            yield row


def _one_step(
    runner: ModelRunner, seqs: int, context: int, step: int, vocab: int
) -> tuple[float, list[int]]:
    width = context // BLOCK_SIZE + 2
    rng = np.random.default_rng(step)
    batch = StepBatch(
        token_ids=rng.integers(0, vocab, seqs),
        query_lens=np.ones(seqs, np.int32),
        kv_lens=np.full(seqs, context + step % BLOCK_SIZE, np.int32),
        block_tables=np.arange(seqs * width, dtype=np.int32).reshape(seqs, width),
        logit_rows=np.arange(seqs),
    )
    start = time.perf_counter()
    drawn = runner.forward(batch).argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - start, drawn


def _same(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Share of equal draws; logits of bfloat16 that all but tie may fall either way."""
    pairs = [(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)]
    return round(sum(x == y for x, y in pairs) / len(pairs), 4)
