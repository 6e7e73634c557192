"""What never fits is refused at once, and what fits alone is never refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixkv.errors import ContextTooLong, InvalidConfig, NeverFits
from radixkv.service.engine.capacity import Capacity
from radixkv.service.engine.params import SamplingParams
from tests.fake_model import Rig, greedy, ids_of


def test_kv_memory_is_divided_into_blocks_and_caps_the_context() -> None:
    plan = Capacity.plan(
        kv_memory=1000, bytes_per_block=90, block_size=4, model_len=2048, max_model_len=None
    )
    assert plan == Capacity(num_blocks=11, block_size=4, max_model_len=44)


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(InvalidConfig, match="needs 600 for a block"):
        Capacity.plan(
            kv_memory=1000, bytes_per_block=600, block_size=4, model_len=8, max_model_len=None
        )


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len is 4096; this model was made for 2048"):
        Capacity.plan(
            kv_memory=10**6, bytes_per_block=9, block_size=4, model_len=2048, max_model_len=4096
        )


def test_a_prompt_longer_than_the_context_names_both_lengths() -> None:
    """ERRORS-1: the text is the one that clients look for."""
    with pytest.raises(ContextTooLong, match="maximum context length is 40 tokens") as caught:
        Capacity(100, 4, 40).max_tokens(41, SamplingParams(), param="messages")
    assert caught.value.param == "messages"
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ContextTooLong, match=r"50 tokens \(30 in the prompt, 20 in the completion"):
        Capacity(100, 4, 40).max_tokens(30, SamplingParams(max_tokens=20), param="prompt")


def test_more_choices_than_the_pool_holds_never_fit() -> None:
    """SCHED-1: a 400 at once, not a wait for ever."""
    with pytest.raises(NeverFits, match="needs 52 KV blocks and the server has 20"):
        Capacity(20, 4, 80).max_tokens(8, SamplingParams(max_tokens=20, n=10), param="prompt")


def test_without_max_tokens_a_choice_gets_what_there_is() -> None:
    assert Capacity(20, 4, 60).max_tokens(10, SamplingParams(), param="prompt") == 50
    assert Capacity(20, 4, 80).max_tokens(10, SamplingParams(n=4), param="prompt") == 15


def test_one_token_needs_no_more_than_the_prompt_whatever_n() -> None:
    assert Capacity(2, 4, 8).max_tokens(5, SamplingParams(n=9, max_tokens=1), param="prompt") == 1


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(2, 12),
    block_size=st.integers(1, 8),
    prompt=st.integers(1, 60),
    n=st.integers(1, 8),
    budget=st.integers(1, 20),
    data=st.data(),
)
def test_what_is_granted_is_served_to_the_end_in_a_pool_of_its_own(
    num_blocks: int, block_size: int, prompt: int, n: int, budget: int, data: st.DataObject
) -> None:
    """SCHED-1: a request that is not refused never waits for room that cannot come."""
    capacity = Capacity(num_blocks, block_size, num_blocks * block_size)
    try:
        granted = capacity.max_tokens(prompt, SamplingParams(n=n), param="prompt")
    except (ContextTooLong, NeverFits):
        assume(False)
    max_tokens = data.draw(st.sampled_from([granted, data.draw(st.integers(1, granted))]))
    rig = Rig(num_blocks=num_blocks, block_size=block_size, max_batch_tokens=budget)
    tokens = [3 + i % 50 for i in range(prompt)]
    for _ in range(2):  # cold, then from what is cached
        stream = rig.submit(tokens, max_tokens, n=n)
        rig.run(limit=4 * (prompt + n * max_tokens))
        assert ids_of(stream) == [greedy(tokens, max_tokens)] * n
