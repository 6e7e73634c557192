"""The engine as a library, on tiny real models: right, repeatable, and clean to start and end."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from radixkv import Engine, SamplingParams
from radixkv.errors import (
    CacheBusy,
    ContextTooLong,
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    NeverFits,
    Overloaded,
)
from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.loading import LoadedModel
from tests import tiny_models

POOL = "1MiB"


def load(arch: str = "llama", **overrides: Any) -> LoadedModel:
    model, tokenizer = tiny_models.build(arch, **overrides)
    return LoadedModel.from_model(model, tokenizer, name=f"tiny-{arch}")


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def by_transformers(loaded: LoadedModel, ids: list[int], num_tokens: int) -> list[int]:
    """What transformers' own generate says, with its own attention and cache."""
    with own_attention(loaded.model, "eager") as model, torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load()


@pytest.fixture
def engine(llama: LoadedModel) -> Iterator[Engine]:
    with Engine(llama, kv_memory=POOL) as engine:
        yield engine
        if engine.alive:
            assert engine.drain(10.0)
            assert engine.check() == []
            stats = engine.stats()
            assert stats.used_blocks == 0
            assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_greedy_ids_equal_transformers_cold_warm_and_in_a_batch(arch: str) -> None:
    loaded = load(arch)
    prompts = [tokens(length, length) for length in (5, 16, 33, 70)]
    expected = [by_transformers(loaded, ids, 10) for ids in prompts]
    with Engine(loaded, kv_memory=POOL, max_batch_tokens=24) as engine:
        ask = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
        for wanted_hits in (False, True):
            streams = [engine.stream_generate(ids, **ask) for ids in prompts]
            results = [stream.result() for stream in streams]
            assert [list(result.token_ids) for result in results] == expected
            if wanted_hits:
                cached = [result.usage.cached_tokens for result in results]
                assert cached == [len(ids) - 1 for ids in prompts]
        fork = engine.generate(prompts[2], n=3, **ask)
        assert [list(choice.token_ids) for choice in fork.choices] == [expected[2]] * 3
        diverged = engine.generate([*prompts[3][:41], 7, 7], **ask)
        assert diverged.usage.cached_tokens == 41
        assert list(diverged.token_ids) == by_transformers(loaded, [*prompts[3][:41], 7, 7], 10)


def test_bfloat16_runs_and_repeats() -> None:
    loaded = load("llama", dtype=torch.bfloat16)
    with Engine(loaded, kv_memory=POOL) as engine:
        first = engine.generate(tokens(30, 1), max_tokens=8, temperature=0)
        second = engine.generate(tokens(30, 1), max_tokens=8, temperature=0)
    assert first.token_ids == second.token_ids
    assert second.usage.cached_tokens == 29


def test_a_chat_is_rendered_answered_and_cached(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    first = engine.chat(messages, max_tokens=5, temperature=0)
    second = engine.chat(messages, max_tokens=5, temperature=0)
    assert first.prompt_token_ids == tuple(engine.render(messages))
    assert second.text == first.text
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1
    assert second.usage.total_tokens == first.usage.prompt_tokens + second.usage.completion_tokens


async def test_the_async_variants_stream_and_answer_the_same(engine: Engine) -> None:
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = await engine.agenerate("hello", **ask)
    parts = [delta async for delta in engine.stream_generate("hello", **ask)]
    assert "".join(delta.text for delta in parts) == whole.text
    assert [delta.finish_reason for delta in parts][-1] == "length"
    chats = await asyncio.gather(
        *(engine.achat([{"role": "user", "content": "hi"}], **ask) for _ in range(4))
    )
    assert len({chat.text for chat in chats}) == 1


def test_choices_with_a_seed_differ_and_repeat(engine: Engine) -> None:
    """COW-2: three choices, each its own, the same again for the same seed."""
    ask: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    first = engine.generate(tokens(40, 2), n=3, **ask)
    second = engine.generate(tokens(40, 2), n=3, **ask)
    ids = [choice.token_ids for choice in first.choices]
    assert len(set(ids)) == 3
    assert ids == [choice.token_ids for choice in second.choices]
    assert engine.generate(tokens(40, 2), n=1, **ask).token_ids == ids[0]


def test_prompt_logprobs_are_the_same_cold_and_warm(engine: Engine) -> None:
    """LOGPROBS-1: every position is there, whatever the cache holds."""
    ids = tokens(45, 3)
    cold = engine.generate(ids, max_tokens=2, temperature=0, prompt_logprobs=2)
    warm = engine.generate(ids, max_tokens=2, temperature=0, prompt_logprobs=2)
    assert cold.prompt_logprobs is not None and warm.prompt_logprobs is not None
    assert len(warm.prompt_logprobs) == 45
    assert warm.prompt_logprobs[0] is None
    for a, b in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True):
        assert a is not None and b is not None
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_the_logprobs_of_a_prompt_of_one_token_are_one_empty_entry(engine: Engine) -> None:
    """LOGPROBS-1: nothing precedes it, so nothing is known of it."""
    answer = engine.generate([7], max_tokens=1, prompt_logprobs=2)
    assert answer.prompt_logprobs == (None,)


def test_a_salt_is_a_cache_of_its_own(engine: Engine) -> None:
    """HASH-4: a salt is a field of the identity, not a string beside others."""
    ids = tokens(40, 4)
    ask: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    engine.generate(ids, **ask)
    assert engine.generate(ids, salt="tiny-llama", **ask).usage.cached_tokens == 0
    assert engine.generate(ids, salt="tiny-llama", **ask).usage.cached_tokens == 39
    assert engine.generate(ids, **ask).usage.cached_tokens == 39


def test_a_lookup_says_what_the_next_request_will_find(engine: Engine) -> None:
    ids = tokens(50, 5)
    assert engine.cache.lookup(ids) == 0
    engine.generate(ids, max_tokens=1)
    before = engine.cache.stats()
    assert engine.cache.lookup([*ids[:30], 1]) == 30
    assert engine.cache.stats() == before


def test_reset_forgets_everything_but_not_under_a_running_request(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory=POOL) as engine:
        engine.generate(tokens(40, 6), max_tokens=1)
        stream = engine.stream_generate(tokens(5, 7), max_tokens=900, ignore_eos=True)
        next(iter_deltas := iter(stream))
        with pytest.raises(CacheBusy):
            engine.cache.reset()
        stream.abort()
        for _ in iter_deltas:
            pass
        assert engine.cache.reset() > 0
        assert engine.cache.lookup(tokens(40, 6)) == 0


def test_warming_up_leaves_no_trace(llama: LoadedModel) -> None:
    """METRICS-1: what nobody asked for is in no counter and in no cache."""
    with Engine(llama, kv_memory=POOL) as engine:
        fresh = engine.stats()
        engine.warm_up()
        engine.check()
        assert engine.stats() == fresh
        engine.generate(tokens(20, 3), max_tokens=2)
        assert engine.stats().requests_total == engine.stats().cache.queries == 1


def test_new_weights_never_meet_old_kv(llama: LoadedModel) -> None:
    """ADMIN-1 and ADMIN-2: the identity follows the weights; going back finds the old blocks."""
    loaded = load()
    old = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    new = tiny_models.build("llama", seed=9)[0].state_dict()
    ids = tokens(40, 8)
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Engine(loaded, kv_memory=POOL) as engine:
        before = engine.generate(ids, **ask)
        engine.update_weights(new)
        after = engine.generate(ids, **ask)
        assert after.usage.cached_tokens == 0
        assert list(after.token_ids) == by_transformers(load(seed=9), ids, 6)
        engine.update_weights(old)
        again = engine.generate(ids, **ask)
        assert again.usage.cached_tokens == 39
        assert again.token_ids == before.token_ids
        with pytest.raises(InvalidRequest, match="no such weight"):
            engine.update_weights({"nonsense": torch.zeros(1)})


def test_a_request_that_runs_across_new_weights_publishes_nothing(llama: LoadedModel) -> None:
    """ADMIN-2: it ends with what it has, and nobody ever finds its mixed KV."""
    loaded = load()
    ids = tokens(20, 9)
    with Engine(loaded, kv_memory=POOL) as engine:
        stream = engine.stream_generate(ids, max_tokens=200, ignore_eos=True, temperature=0)
        deltas = iter(stream)
        next(deltas)
        engine.update_weights(tiny_models.build("llama", seed=9)[0].state_dict())
        for _ in deltas:
            pass
        answer = stream.result()
        assert len(answer.token_ids) == 200
        assert engine.cache.lookup([*ids, *answer.token_ids]) == 0


def test_a_request_that_waits_starts_with_the_new_weights(llama: LoadedModel) -> None:
    """ADMIN-1: whatever computes its KV, the old weights' cache is neither read nor written."""
    loaded = load()
    old = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    ids = tokens(40, 8)
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Engine(loaded, kv_memory=POOL, max_num_seqs=1) as engine:
        before = engine.generate(ids[:30], **ask)
        running = engine.stream_generate(tokens(5, 7), max_tokens=900, ignore_eos=True)
        next(deltas := iter(running))
        waiting = engine.stream_generate(ids, **ask)
        engine.update_weights(tiny_models.build("llama", seed=9)[0].state_dict())
        running.abort()
        for _ in deltas:
            pass
        answer = waiting.result()
        assert answer.usage.cached_tokens == 0
        assert list(answer.token_ids) == by_transformers(load(seed=9), ids, 6)
        assert engine.generate(ids, **ask).usage.cached_tokens == 39
        engine.update_weights(old)
        assert engine.cache.lookup(ids) == 30
        assert engine.generate(ids[:30], **ask).token_ids == before.token_ids


def test_what_cannot_be_served_is_refused_at_once(llama: LoadedModel) -> None:
    """ERRORS-1, SCHED-1, LEAK-6: nothing is queued and nothing is held."""
    with Engine(llama, kv_memory=POOL, max_model_len=64) as engine:
        with pytest.raises(ContextTooLong):
            engine.generate(tokens(64, 1))
        with pytest.raises(ContextTooLong):
            engine.generate(tokens(60, 1), max_tokens=5)
        with pytest.raises(InvalidRequest, match="no tokens"):
            engine.generate([])
        with pytest.raises(InvalidRequest, match="token id 100000"):
            engine.generate([100_000])
        with pytest.raises(InvalidRequest, match="temprature is no sampling parameter"):
            engine.generate([5], temprature=0)
        with pytest.raises(InvalidRequest):
            engine.generate([5], logit_bias={10**6: 1.0})
        assert engine.stats().num_waiting == engine.stats().num_running == 0
        assert (
            engine.generate(tokens(60, 1), max_tokens=4, ignore_eos=True).usage.total_tokens == 64
        )
    small = 12 * 4096
    with Engine(llama, kv_memory=small) as engine, pytest.raises(NeverFits):
        engine.generate(tokens(20, 1), n=100, max_tokens=60)


def test_a_full_queue_refuses_and_the_rest_goes_on(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory=POOL, max_num_seqs=2, max_queue=1) as engine:
        streams = [
            engine.stream_generate(tokens(5, i), max_tokens=300, ignore_eos=True) for i in range(3)
        ]
        with pytest.raises(Overloaded) as caught:
            engine.generate(tokens(5, 9))
        assert caught.value.retry_after_s >= 1
        assert [len(stream.result().token_ids) for stream in streams] == [300] * 3
        engine.generate(tokens(5, 9), max_tokens=1)


def test_unknown_settings_and_bad_values_are_named() -> None:
    loaded = load()
    with pytest.raises(InvalidConfig, match="kv_memry is no setting"):
        Engine(loaded, kv_memry="1GiB")
    with pytest.raises(InvalidConfig, match="kv_memory is 'lots'"):
        Engine(loaded, kv_memory="lots")
    with pytest.raises(InvalidConfig, match="two blocks at least"):
        Engine(loaded, kv_memory=100)


def test_a_dead_engine_says_so_to_everyone(llama: LoadedModel, monkeypatch: Any) -> None:
    """ERRORS-3: those who wait get an error, and so does whoever comes later."""
    with Engine(llama, kv_memory=POOL) as engine:
        stream = engine.stream_generate(tokens(5, 1), max_tokens=900, ignore_eos=True)
        deltas = iter(stream)
        next(deltas)

        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.runner, "forward", broken)
        with pytest.raises(EngineDead, match="has failed") as caught:
            for _ in deltas:
                pass
        assert "the device is gone" in str(caught.value.__cause__)
        engine._core._thread.join(5)
        assert not engine.alive
        assert isinstance(engine.failure, RuntimeError)
        with pytest.raises(EngineDead):
            engine.generate([5])
        with pytest.raises(EngineDead):
            engine.cache.reset()


def test_a_message_that_fails_while_an_engine_ends_keeps_no_news_from_the_others(
    llama: LoadedModel, monkeypatch: Any
) -> None:
    """ERRORS-3"""
    with Engine(llama, kv_memory=POOL) as engine:
        core = engine._core
        waiting = engine.stream_generate(tokens(5, 1), max_tokens=900, ignore_eos=True)
        deltas = iter(waiting)
        next(deltas)

        def fails() -> None:
            raise ZeroDivisionError

        def broken() -> None:
            core._inbox.put(fails)  # met first by the burial
            core._inbox.put(fails)
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(core, "step", broken)
        with pytest.raises(EngineDead, match="has failed"):
            for _ in deltas:
                pass
        core._thread.join(5)
        assert isinstance(engine.failure, RuntimeError) and not core.in_flight()


def test_closing_ends_what_runs_and_refuses_what_comes(llama: LoadedModel) -> None:
    engine = Engine(llama, kv_memory=POOL)
    stream = engine.stream_generate(tokens(5, 1), max_tokens=900, ignore_eos=True)
    engine.close()
    engine.close()
    with pytest.raises(EngineDead):
        stream.result()
    with pytest.raises(EngineDead):
        engine.generate([5])


def test_draining_lets_running_requests_end(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory=POOL) as engine:
        stream = engine.stream_generate(tokens(5, 1), max_tokens=100, ignore_eos=True)
        assert engine.drain(30.0)
        assert len(stream.result().token_ids) == 100
        with pytest.raises(EngineDead, match="shutting down"):
            engine.generate([5])


def test_threads_and_aborts_leave_nothing_behind(engine: Engine) -> None:
    """LEAK-1, LEAK-4: many callers, some of whom leave at a random moment."""
    failures: list[BaseException] = []
    shared = tokens(30, 1)

    def caller(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for i in range(12):
                params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True, seed=i)
                stream = engine.submit(shared[: rng.randint(1, 30)] + tokens(5, seed), params)
                leave_after = rng.randint(0, 25)
                for at, _ in enumerate(stream):
                    if at == leave_after:
                        break
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_thousands_of_short_requests_leave_the_usage_where_it_was(engine: Engine) -> None:
    """LEAK-4 and LEAK-6: good and refused ones, one after another."""
    for i in range(300):
        engine.generate(tokens(6, i), max_tokens=1, temperature=0)
        with pytest.raises(InvalidRequest):
            engine.generate([10**7])
    stats = engine.stats()
    assert stats.used_blocks == 0
    assert 0 <= stats.kv_usage <= 1


def test_small_pools_never_mix_conversations(llama: LoadedModel) -> None:
    """SECURITY-7 and SCHED-1: forty conversations in a pool for three, eight at a time."""
    prompts = [tokens(30, 1000 + i) for i in range(40)]
    with Engine(llama, kv_memory="1MiB") as roomy:
        expected = [
            roomy.generate(ids, max_tokens=12, temperature=0, ignore_eos=True).token_ids
            for ids in prompts
        ]
        per_block = (1 << 20) // roomy.stats().num_blocks
    with Engine(llama, kv_memory=9 * per_block, lookahead_tokens=0) as engine:
        for at in range(0, 40, 8):
            streams = [
                engine.stream_generate(ids, max_tokens=12, temperature=0, ignore_eos=True)
                for ids in prompts[at : at + 8]
            ]
            for stream, wanted in zip(streams, expected[at : at + 8], strict=True):
                assert stream.result().token_ids == wanted
        assert engine.check() == []
        assert engine.stats().cache.evicted_blocks > 0


def test_cached_tokens_add_up_to_the_hit_counter(engine: Engine) -> None:
    """METRICS-2: the sum over requests is the counter, and hits never exceed queries."""
    total = 0
    for i in range(20):
        ids = tokens(40, i % 4)[: 20 + i] + [i + 3]
        total += engine.generate(ids, max_tokens=3).usage.cached_tokens
    stats = engine.stats()
    assert stats.cache.hit_tokens == total == stats.prompt_tokens_cached_total
    assert stats.cache.hit_tokens <= stats.cache.queried_tokens
    assert (
        stats.prompt_tokens_total
        == stats.prompt_tokens_cached_total + stats.prompt_tokens_computed_total
    )
