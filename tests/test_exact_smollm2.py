"""The promise, on a real model: fp32 greedy ids equal those of ``transformers.generate``, always.

Twenty varied prompts, each cold, warm, with a hit that ends inside a block, beside unrelated
requests, in chunks of any size, after a preemption, and forked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from radixkv import Engine
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from radixkv.service.engine.stream import Stream

NEW_TOKENS = 20  # more than a block, so that generated tokens cross a border and are published
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is the boiling point of water?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be, that is",
    "import numpy as np\n\nx = np.array([",
    "The three primary colours are red,",
    "Translate to French: Good morning ->",
    "Ein kurzer Satz auf Deutsch:",
    "日本の首都は",
    "🙂🙃 emoji say more than",
    "x",
    "SELECT name, COUNT(*) FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In 1969, humans first walked on the Moon. The mission was called",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n- 250 ml milk\n\nSteps:\n1.",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName a fish."
    "<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    return [loaded.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers itself says, with its own attention and its own cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    answers = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_model(model_path, name="smollm2", dtype="float32", device="cpu")


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with Engine(loaded, kv_memory="256MiB") as engine:
        yield engine
        assert engine.check() == []


def ask(
    engine: Engine, prompts: list[list[int]], *, at_once: int = 1, n: int = 1
) -> list[tuple[list[int], int]]:
    """Run the prompts, ``at_once`` at a time, which arrive between the same two steps."""
    results: list[tuple[list[int], int]] = []
    how = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "n": n}

    def submit(some: list[list[int]]) -> list[Stream]:
        return [engine.stream_generate(ids, **how) for ids in some]

    for at in range(0, len(prompts), at_once):
        some = prompts[at : at + at_once]
        for stream in engine._core.call(partial(submit, some)).result():
            generation = stream.result()
            for choice in generation.choices:
                results.append((list(choice.token_ids), generation.usage.cached_tokens))
    return results


def test_cold_then_warm(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """CORRECT-8: a repeat computes one token, and says the same."""
    cold = ask(engine, prompts)
    assert [ids for ids, _ in cold] == expected
    warm = ask(engine, prompts)
    assert [ids for ids, _ in warm] == expected
    assert [cached for _, cached in warm] == [len(ids) - 1 for ids in prompts]


def test_warm_with_the_hit_ending_inside_a_block(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The copied part of a block counts as cached and changes nothing."""
    for ids, answer in zip(prompts, expected, strict=True):
        cut = max(1, len(ids) * 2 // 3)
        cut -= cut % 16 == 0
        seed = [*ids[:cut], 0, 0, 0]  # diverges there
        ask(engine, [seed], at_once=1)
        ((got, cached),) = ask(engine, [ids])
        assert got == answer
        assert cached >= min(cut, len(ids) - 1)
        engine.cache.reset()


def test_in_a_batch_with_unrelated_requests(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """CORRECT-2: fresh prefills, hits and decodes side by side in one step."""
    assert [ids for ids, _ in ask(engine, prompts, at_once=8)] == expected
    assert [ids for ids, _ in ask(engine, prompts[::-1], at_once=8)] == expected[::-1]


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_in_chunks_of_any_size(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    """CORRECT-4."""
    with Engine(loaded, kv_memory="256MiB", max_batch_tokens=budget) as engine:
        assert [ids for ids, _ in ask(engine, prompts, at_once=10)] == expected
        assert engine.check() == []


def test_after_forced_preemptions(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """SCHED-1: a pool that is far too small for all of them."""
    with Engine(loaded, kv_memory=10 * 16 * 46_080, lookahead_tokens=0) as engine:
        assert [ids for ids, _ in ask(engine, prompts, at_once=20)] == expected
        assert engine.stats().preemptions_total > 0
        assert engine.check() == []


def test_three_forked_choices(
    engine: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """COW-1."""
    forked = ask(engine, prompts, at_once=5, n=3)
    assert [ids for ids, _ in forked] == [answer for answer in expected for _ in range(3)]
