"""Adapters as PEFT itself makes and saves them, with the models that PEFT computes them by."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model

from radixkv.kernels.native_adapters import PARTS
from radixkv.service.engine.adapters import Adapter
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.runner import ModelRunner
from tests.tiny_models import build

BLOCK = 16


def save_adapter(folder: Path, arch: str = "llama", *, seed: int = 1, **config: Any) -> Any:
    """Save a random adapter of the tiny model into ``folder``; returns PEFT's model with it on."""
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(PARTS)}
    model: Any = get_peft_model(
        build(arch)[0], LoraConfig(task_type="CAUSAL_LM", **(fields | config))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # PEFT begins with b = 0, which would add nothing
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, save_embedding_layers=False)
    return model.eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a saved adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change, add or (None) remove tensors of a saved adapter."""
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, Any] = safetensors.torch.load_file(path) | changes
    safetensors.torch.save_file({n: t for n, t in tensors.items() if t is not None}, path)


@torch.inference_mode()
def own_logits(model: Any, ids: Iterable[int]) -> torch.Tensor:
    """The logits of every position, by PEFT or by transformers alone."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def own_answer(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """What ``generate`` of PEFT or transformers answers greedily."""
    out = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def random_ids(length: int, seed: int) -> list[int]:
    """Ids of plain tokens."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, 300, length)]


class Steps:
    """A runner over its own pool, where sequence i has the blocks i * 16 and on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def run(
        self,
        *work: tuple[int, list[int], int, int, Adapter | None],
        logit_rows: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Compute tokens [start, stop) of each (place, ids, start, stop, adapter)."""
        tokens = np.concatenate([np.array(ids[start:stop]) for _, ids, start, stop, _ in work])
        rows = np.arange(len(tokens)) if logit_rows is None else np.array(logit_rows, np.int64)
        logits = self.runner.forward(
            StepBatch(
                token_ids=tokens,
                query_lens=np.array([stop - start for _, _, start, stop, _ in work], np.int32),
                kv_lens=np.array([stop for _, _, _, stop, _ in work], np.int32),
                block_tables=np.array([np.arange(16) + 16 * place for place, *_ in work], np.int32),
                logit_rows=rows,
                adapters=[adapter for *_, adapter in work],
            )
        )
        if logit_rows is not None:
            return [logits]
        return list(torch.split(logits, [stop - start for _, _, start, stop, _ in work]))
