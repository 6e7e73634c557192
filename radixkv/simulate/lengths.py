"""Lengths of prompts and answers: drawn after published means, or read from a trace.

Knows numbers of tokens alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidConfig

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and answers of requests that wait in line. Both [n] int64, at least 1."""

    name: str
    prompts: Lengths
    answers: Lengths


@dataclass(frozen=True, slots=True)
class _Shape:
    """Mean and standard deviation over mean, of prompts and of answers."""

    prompt_mean: float
    prompt_spread: float
    answer_mean: float
    answer_spread: float


# Means: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
# PagedAttention" (2023), section 6.1. The spread of ShareGPT's answers follows from its figure 2:
# with 7 sequences of 2,048 reserved slots each, 13.3 % of 15.7k slots are yet to be filled, which
# is E[L^2] / 2 E[L] = 298 tokens each. Of the other spreads only the order of size is known.
PRESETS = {
    "sharegpt": _Shape(161.3, 1.3, 338.0, 0.87),
    "alpaca": _Shape(19.3, 0.8, 58.5, 0.9),
}


def draw(name: str, n: int, *, max_tokens: int = 2048, seed: int = 0) -> Workload:
    """Draw ``n`` requests of a preset; prompt and answer together have at most ``max_tokens``.

    Gamma distributions, whose cut at ``max_tokens`` is made up for so that the means hold.
    """
    if name not in PRESETS:
        raise InvalidConfig(f"workload is {name!r}; known: {', '.join(PRESETS)}, or a file")
    shape, rng = PRESETS[name], np.random.default_rng(seed)
    prompts = _gamma(rng, shape.prompt_mean, shape.prompt_spread, n, max_tokens // 2)
    answers = _gamma(rng, shape.answer_mean, shape.answer_spread, n, max_tokens * 3 // 4)
    return Workload(name, prompts, np.minimum(answers, max_tokens - prompts))


def read(path: Path) -> Workload:
    """Read JSON lines of ``{"prompt_tokens": n, "completion_tokens": n}``; InvalidConfig names the
    line that is none."""
    prompts, answers = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            pair = record["prompt_tokens"], record["completion_tokens"]
        except (ValueError, KeyError, TypeError):
            pair = (0, 0)
        if not all(type(n) is int and n > 0 for n in pair):
            raise InvalidConfig(
                f"{path}:{number}: wanted an object with prompt_tokens and completion_tokens, "
                "whole numbers from 1 on"
            )
        prompts.append(pair[0])
        answers.append(pair[1])
    if not prompts:
        raise InvalidConfig(f"{path} has no requests")
    return Workload(path.stem, np.array(prompts, np.int64), np.array(answers, np.int64))


def _gamma(rng: np.random.Generator, mean: float, spread: float, n: int, most: int) -> Lengths:
    shape = 1 / spread**2
    drawn = rng.gamma(shape, mean / shape, n)
    for _ in range(20):  # cutting lowers the mean: scale until it is met
        cut = np.clip(np.rint(drawn), 1, most)
        drawn *= mean / cut.mean()
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)
