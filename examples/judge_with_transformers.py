"""A judge: 200 answers scored under one rubric, with plain transformers and no engine.

Run: python examples/judge_with_transformers.py [--model smollm2] [--answers 200]

The rubric is computed once; each answer costs only its own tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixkv import TransformersPrefixCache
from radixkv.service.engine.resolving import resolve_model

RUBRIC = """You judge answers to questions of arithmetic. A good answer names the result, is
brief, and is right. An answer that is wrong, or that does not answer, is bad. Politeness counts
for nothing, nor does length; a right number without a word is better than a page without one.

Question: What is 2 + 2?
Good answer: The answer is 4.
Question: What is 3 + 4?
Good answer: The answer is 7.
Question: What is 10 + 5?
Good answer: The answer is 15.
Question: What is {a} + {b}?
Good answer:"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=200)
    args = parser.parse_args()

    directory = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)  # in eval mode
    cache = TransformersPrefixCache(model, tokenizer, memory="128MiB")

    rubric = tokenizer(RUBRIC.format(a=12, b=30)).input_ids
    texts = [f" The answer is {number}." for number in range(args.answers)]
    answers = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    start = time.perf_counter()
    scores = cache.score(rubric, answers)
    seconds = time.perf_counter() - start

    best = sorted(zip(scores, texts, strict=True), reverse=True)[:3]
    for score, text in best:
        print(f"{score:8.2f} {text}")
    stats = cache.stats()
    print(
        f"{len(answers)} answers under a rubric of {len(rubric)} tokens in {seconds:.1f} s: "
        f"{stats.prompt_tokens} tokens asked for, {stats.cached_tokens} shared, "
        f"{stats.computed_tokens} computed"
    )


if __name__ == "__main__":
    main()
