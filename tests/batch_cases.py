"""Files of batch requests with a known structure, for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def completion(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    """One line for /v1/completions; greedy, a few tokens."""
    asked = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": asked | body,
    }


def chat(custom_id: str, *texts: str, **body: Any) -> dict[str, Any]:
    """One line for /v1/chat/completions: a system prompt and a question, or only a question."""
    roles = ("system", "user")[-len(texts) :]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    asked = {"messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": asked | body,
    }


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write a file of lines; what is a string is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def three_levels(
    num: int, *, tops: int = 5, middles: int = 6, seed: int = 1, vocab: int = 300, **body: Any
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """``num`` shuffled completions: a shared beginning, one of ``tops``, one of ``middles`` below
    each, an end of its own. Lengths are odd, so that no border falls on a block's."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(draw.randint(low, high))]

    root = ids(21, 21)
    branches = [root + ids(20, 45) for _ in range(tops)]
    stems = [branch + ids(15, 40) for branch in branches for _ in range(middles)]
    prompts = [stems[i % len(stems)] + ids(1, 20) for i in range(num)]
    draw.shuffle(prompts)
    lines = [
        completion(f"line-{i}", prompt, **({"max_tokens": draw.randint(1, 6)} | body))
        for i, prompt in enumerate(prompts)
    ]
    return lines, prompts


def tree_tokens(prompts: list[list[int]]) -> tuple[int, int]:
    """The edges of the prompts' prefix tree, counted one by one; and repeated prompts."""
    seen: set[tuple[int, ...]] = set()
    edges: set[tuple[int, ...]] = set()
    repeats = 0
    for prompt in prompts:
        repeats += tuple(prompt) in seen
        seen.add(tuple(prompt))
        edges |= {tuple(prompt[: i + 1]) for i in range(len(prompt))}
    return len(edges), repeats
