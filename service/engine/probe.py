"""Proves that a loaded model gives through the paged pool what it gives by itself, or refuses it.

This is the guard against what no list of rules foresees: a state carried between tokens, rows that
see each other, a keyword with another meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.errors import UnsupportedModel
from radixkv.service.engine.attention import attention_of
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.runner import ModelRunner

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel

_BLOCK_SIZE = 16
_LENGTHS = (37, 10)
_STEPS = ((18, 9), (19, 1))
"""New tokens of both sequences a step: two prefills side by side, then a chunk beside a decode."""
_TABLES = ((4, 1, 3), (2, 0, 0))
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Greatest ||difference|| / ||logits||: far above rounding, far below a wrong key."""


def refuse_if_inexact(loaded: LoadedModel) -> None:
    """Raise UnsupportedModel if paged logits differ from those of the model's own attention.

    Costs four forward passes of a few tokens each.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, loaded.vocab_size, size=n) for n in _LENGTHS]
    own = torch.cat([_own_logits(loaded, prompt) for prompt in prompts])
    try:
        paged = torch.cat(_paged_logits(loaded, prompts))
    except (ValueError, RuntimeError, TypeError) as e:
        raise UnsupportedModel(
            f"{type(loaded.model).__name__} cannot be served: paged attention failed with {e}"
        ) from e
    scale = (own - own.mean(-1, keepdim=True)).norm()
    error = float((paged - own).norm() / scale) if float(scale) > 0 else 0.0
    if not error <= _TOLERANCE.get(loaded.dtype, 1e-3):
        raise UnsupportedModel(
            f"{type(loaded.model).__name__} cannot be served exactly: over the paged pool its "
            f"logits differ from its own by {error:.2%}; it keeps something that is neither a key "
            "nor a value of a token"
        )


@torch.inference_mode()
def _own_logits(
    loaded: LoadedModel, prompt: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> torch.Tensor:
    ids = torch.from_numpy(prompt).to(loaded.device).unsqueeze(0)
    with attention_of(loaded.model, "eager"):
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=True).logits
    return logits[0].float()


def _paged_logits(
    loaded: LoadedModel, prompts: list[np.ndarray[tuple[int], np.dtype[np.int64]]]
) -> list[torch.Tensor]:
    """The logits of every position of each prompt, computed in the steps above."""
    runner = ModelRunner(loaded, 1 + max(map(max, _TABLES)), _BLOCK_SIZE)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for lens in _STEPS:
        new = [p[d : d + n] for p, d, n in zip(prompts, done, lens, strict=True)]
        done = [d + n for d, n in zip(done, lens, strict=True)]
        tokens = np.concatenate(new)
        logits = runner.forward(
            StepBatch(
                token_ids=tokens,
                query_lens=np.array(lens, np.int32),
                kv_lens=np.array(done, np.int32),
                block_tables=np.array(_TABLES, np.int32),
                logit_rows=np.arange(len(tokens)),
            )
        )
        for rows, part in zip(found, torch.split(logits, list(lens)), strict=True):
            rows.append(part)
    return [torch.cat(rows) for rows in found]
