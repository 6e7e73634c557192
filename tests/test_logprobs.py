"""Log-probabilities of prompts in chunks, and of tokens by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.logprobs import PromptLogprobs, token_logprob
from radixkv.service.engine.sampling import SampledToken
from tests.tiny_models import build_tokenizer

TEXT = TokenText(build_tokenizer())
VOCAB = len(TEXT.tables.known)


def prompt_and_logits(length: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB, (length,), generator=made).tolist()
    return ids, torch.randn(length, VOCAB, generator=made) * 3


def in_one_go(ids: list[int], logits: torch.Tensor, k: int) -> list[Any]:
    own = torch.log_softmax(logits, 1)
    wanted: list[Any] = [None]
    for i, token_id in enumerate(ids[1:]):
        best = own[i].topk(k)
        wanted.append((token_id, float(own[i, token_id]), best.indices.tolist()))
    return wanted[: len(ids)]


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 90),
    cuts=st.lists(st.integers(1, 40), max_size=6),
    again=st.integers(0, 5),
    k=st.sampled_from([0, 1, 5]),
)
def test_chunks_of_any_size_give_what_one_pass_gives(
    length: int, cuts: list[int], again: int, k: int
) -> None:
    """LOGPROBS-1. ``again`` positions of each chunk are computed twice, as after a preemption."""
    ids, logits = prompt_and_logits(length)
    prompt = PromptLogprobs(ids, k, TEXT)
    at = 0
    for size in [*cuts, length]:
        start = max(0, at - again)
        prompt.add(start, logits[start : at + size])
        at = min(length, at + size)
    assert prompt.complete
    for entry, wanted in zip(prompt.result(), in_one_go(ids, logits, k), strict=True):
        if wanted is None:
            assert entry is None
            continue
        assert entry is not None
        assert (entry.token_id, [t[0] for t in entry.top]) == (wanted[0], wanted[2])
        assert entry.logprob == pytest.approx(wanted[1], abs=1e-4)
        assert entry.token_bytes == TEXT.token_bytes(entry.token_id)
        assert [t[3] for t in entry.top] == sorted((t[3] for t in entry.top), reverse=True)


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    prompt = PromptLogprobs([7], 3, TEXT)
    assert prompt.complete and prompt.result() == (None,)
    prompt.add(0, torch.zeros(1, VOCAB))
    assert prompt.result() == (None,)
    assert PromptLogprobs([], 3, TEXT).result() == ()


def test_the_logits_of_a_whole_prompt_are_never_kept() -> None:
    ids, logits = prompt_and_logits(64)
    prompt = PromptLogprobs(ids, 5, TEXT)
    prompt.add(0, logits)
    kept = sum(a.nbytes for a in vars(prompt).values() if hasattr(a, "nbytes"))
    assert kept <= 64 * (8 + 4 + 5 * 8)


def test_a_gap_is_a_bug_of_the_caller() -> None:
    ids, logits = prompt_and_logits(10)
    prompt = PromptLogprobs(ids, 0, TEXT)
    prompt.add(0, logits[:3])
    with pytest.raises(AssertionError, match="gaps"):
        prompt.add(4, logits[4:])
    with pytest.raises(AssertionError, match="missing"):
        prompt.result()


def test_more_rivals_than_tokens_gives_them_all() -> None:
    prompt = PromptLogprobs([0, 1], 20, TEXT)
    prompt.add(0, torch.zeros(2, 4))
    entry = prompt.result()[1]
    assert entry is not None and len(entry.top) == 4
    assert entry.logprob == pytest.approx(-math.log(4))


def test_a_token_is_named_with_its_rivals() -> None:
    half = next(i for i in range(3, 259) if TEXT.token_bytes(i) == b"\xe6")
    named = token_logprob(SampledToken(half, -0.5, ((half, -0.5), (2, -1.5))), TEXT.token_bytes)
    assert (named.token_id, named.token, named.token_bytes) == (half, "�", b"\xe6")
    assert named.top == ((half, "�", b"\xe6", -0.5), (2, "<|im_end|>", b"<|im_end|>", -1.5))
