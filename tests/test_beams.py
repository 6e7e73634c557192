"""Beam search by an engine: ids and scores of transformers, in the batch with everything else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import Engine
from radixkv.errors import EngineDead, InvalidRequest, NeverFits, Overloaded
from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.keep import Keep
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.stream import Stream
from tests import tiny_models
from tests.beam_cases import Answer, assert_same, by_transformers

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
    "<|im_start|>user\nName a fish.<|im_end|>\n<|im_start|>assistant\n",
]
SEARCHES: list[tuple[int, float, Any]] = [  # beam width, length penalty, early stopping
    (1, 1.0, False),
    (2, 1.0, False),
    (3, 1.0, True),
    (4, 0.0, False),
    (4, -1.0, "never"),
    (5, 2.0, "never"),
    (6, 1.0, "never"),
    (2, -0.5, True),
    (3, 0.5, False),
    (4, 1.0, False),
]


def load(arch: str = "llama", **overrides: Any) -> LoadedModel:
    model, tokenizer = tiny_models.build(arch, **overrides)
    return LoadedModel.from_model(model, tokenizer, name=f"tiny-{arch}")


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load()


@pytest.fixture(scope="module")
def engine(llama: LoadedModel) -> Iterator[Engine]:
    with Engine(llama, kv_memory="1MiB") as engine:
        yield engine
        assert engine.check() == []
        stats = engine.stats()
        assert stats.used_blocks == 0 and stats.violations_total == 0


def expected(loaded: LoadedModel, ids: list[int], **asked: Any) -> list[Answer]:
    with own_attention(loaded.model, "eager") as model:
        return by_transformers(model, ids, **asked)


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_ids_and_scores_are_those_of_transformers(arch: str, llama: LoadedModel) -> None:
    """Widths 1 to 6, all ways to stop, length penalties of both signs, ends inside beams; cold and
    with a prompt that is cached (COW-3, DETERM-2)."""
    loaded = llama if arch == "llama" else load(arch)
    rng = random.Random(7)
    with Engine(loaded, kv_memory="1MiB") as engine:
        for width, penalty, early in SEARCHES:
            ids = tokens(rng.randint(1, 40), seed=rng.randrange(99))
            eos = rng.sample(range(300), rng.choice([0, 1, 60]))
            asked: dict[str, Any] = {"n": rng.randint(1, width), "max_tokens": rng.randint(1, 24)}
            search = {} if width == 1 else {"length_penalty": penalty, "early_stopping": early}
            wanted = expected(loaded, ids, width=width, eos=eos, **asked, **search)
            for _ in range(2):
                found = engine.beam_search(
                    ids,
                    beam_width=width,
                    stop_token_ids=eos,
                    ignore_eos=True,
                    **asked,
                    **search,
                )
                assert_same(found.beams, wanted, eos, search.get("length_penalty", 1.0))
                assert found.most_copied_blocks <= width
                assert found.usage.prompt_tokens == len(ids)
                assert found.usage.completion_tokens == sum(len(a.ids) for a in wanted)
            assert found.usage.cached_tokens == len(ids) - 1
        assert engine.check() == []


def test_smollm2_finds_the_beams_of_transformers_on_ten_prompts() -> None:
    """The promise on a real model in fp32, all ten at once: eos and a full stop end answers."""
    from transformers import AutoModelForCausalLM

    path: Path = resolve_model("smollm2")
    loaded = load_model(path, name="smollm2", dtype="float32", device="cpu")
    stop = loaded.tokenizer.encode(".")[0]
    eos = {*loaded.eos_token_ids, stop}
    prompts = [loaded.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    with Engine(loaded, kv_memory="128MiB") as engine:
        streams = [
            engine.submit(
                ids,
                SamplingParams(
                    max_tokens=7,
                    n=width,
                    stop_token_ids=(stop,),
                    beams=BeamParams(width, penalty, early),
                ),
            )
            for ids, (width, penalty, early) in zip(prompts, SEARCHES, strict=True)
        ]
        found = [stream.result() for stream in streams]
        assert engine.check() == []
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for ids, answer, (width, penalty, early) in zip(prompts, found, SEARCHES, strict=True):
        search = {} if width == 1 else {"length_penalty": penalty, "early_stopping": early}
        wanted = by_transformers(model, ids, width=width, n=width, max_tokens=7, eos=eos, **search)
        assert_same(answer.choices, wanted, eos, penalty)


def test_beams_run_beside_other_requests_and_change_none(engine: Engine) -> None:
    """DETERM-4: what else is in the batch changes neither."""
    alone = engine.beam_search(tokens(20, 1), beam_width=4, max_tokens=12)
    sampled = engine.generate(tokens(11, 2), seed=5, max_tokens=20, n=3)
    streams = [
        engine.stream_generate(tokens(11, 2), seed=5, max_tokens=20, n=3),
        engine.stream_generate(
            tokens(20, 1), n=4, temperature=0, max_tokens=12, beams=BeamParams(4)
        ),
        engine.stream_generate(tokens(33, 3), temperature=0, max_tokens=20),
    ]
    answers = [stream.result() for stream in streams]
    assert [c.text for c in answers[0].choices] == [c.text for c in sampled.choices]
    assert answers[1].choices == alone.beams


def test_waiting_and_awaiting_find_the_same(engine: Engine) -> None:
    waited = engine.beam_search("hello the world", beam_width=3, max_tokens=9, logprobs=2)
    awaited = asyncio.run(
        engine.abeam_search("hello the world", beam_width=3, max_tokens=9, logprobs=2)
    )
    assert awaited.beams == waited.beams
    assert waited.text == waited.beams[0].text and waited.token_ids == waited.beams[0].token_ids


def test_log_probabilities_of_a_beam_add_up_and_name_rivals(engine: Engine) -> None:
    found = engine.beam_search(
        tokens(9, 4), beam_width=3, max_tokens=7, logprobs=2, ignore_eos=True
    )
    for beam in found.beams:
        assert beam.logprobs is not None and len(beam.logprobs) == 7
        assert sum(token.logprob for token in beam.logprobs) == pytest.approx(
            beam.cumulative_logprob, abs=1e-4
        )
        assert all(len(token.top) == 2 for token in beam.logprobs)
    scores = [beam.score or 0.0 for beam in found.beams]
    assert scores == sorted(scores, reverse=True)


def test_tokens_that_end_an_answer_wait_for_min_tokens(engine: Engine) -> None:
    ends = list(range(0, 300, 2))
    early = engine.beam_search(tokens(8, 5), beam_width=2, max_tokens=12, stop_token_ids=ends)
    late = engine.beam_search(
        tokens(8, 5), beam_width=2, max_tokens=12, stop_token_ids=ends, min_tokens=6
    )
    assert min(len(beam.token_ids) for beam in early.beams) < 6
    assert min(len(beam.token_ids) for beam in late.beams) >= 6


def test_an_answer_stays_cached_and_dead_beams_do_not(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory="1MiB", block_size=4) as engine:
        ids = tokens(16, 6)
        found = engine.beam_search(ids, beam_width=6, n=1, max_tokens=24, ignore_eos=True)
        whole = [*ids, *found.token_ids]
        again = engine.generate([*whole, 7], max_tokens=1, temperature=0)
        assert again.usage.cached_tokens == len(whole) - 1  # the last one's KV was never needed
        assert engine.stats().cached_blocks <= (len(whole) + 3) // 4 + 1


def test_a_searched_prompt_can_be_pinned_and_scored(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory="1MiB", pin_budget=0.5, max_model_len=256) as engine:
        ids = tokens(30, 9)
        params = SamplingParams(
            n=2, max_tokens=5, prompt_logprobs=1, ignore_eos=True, beams=BeamParams(3)
        )
        answer = engine.submit(ids, params, keeps=[Keep(len(ids))]).result()
        assert answer.kept[0].granted_tokens > 0
        scored = engine.generate(ids, max_tokens=1, prompt_logprobs=1)
        assert answer.prompt_logprobs == scored.prompt_logprobs
        assert engine.check() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.1),
        ("logit_bias", {5: 1.0}),
        ("stop", "x"),
        ("best_of", 3),
        ("n", 4),
        ("length_penalty", 9.0),
        ("early_stopping", "sometimes"),
        ("beam_width", 0),
        ("beam_width", 1000),
    ],
)
def test_what_a_search_cannot_honour_is_refused_by_name(
    engine: Engine, field: str, value: object
) -> None:
    asked: dict[str, Any] = {"beam_width": 3, "max_tokens": 4} | {field: value}
    with pytest.raises(InvalidRequest) as caught:
        engine.beam_search(tokens(5, 1), **asked)
    assert caught.value.param == field and field in str(caught.value)


def test_a_width_beyond_what_may_follow_is_refused_and_nothing_is_left(engine: Engine) -> None:
    most = engine.vocab_size
    with pytest.raises(InvalidRequest, match="only 2 tokens do not end"):
        engine.beam_search(
            tokens(5, 1),
            beam_width=3,
            max_tokens=4,
            ignore_eos=True,
            stop_token_ids=range(most - 2),
        )
    assert engine.check() == []


def test_a_search_that_never_fits_is_refused_at_once(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory="64KiB", max_model_len=64) as engine:
        blocks = engine.stats().num_blocks
        with pytest.raises(NeverFits):
            engine.beam_search(tokens(8, 1), beam_width=blocks + 1, max_tokens=40)
        found = engine.beam_search(tokens(8, 1), beam_width=blocks // 2, ignore_eos=True)
        assert len(found.beams) == blocks // 2  # as long as there is room for
        assert engine.check() == []


def test_beams_take_as_many_places_as_run(llama: LoadedModel) -> None:
    with Engine(llama, kv_memory="1MiB", max_num_seqs=4, max_queue=0) as engine:
        first = engine.submit(
            tokens(8, 1), SamplingParams(max_tokens=200, ignore_eos=True, beams=BeamParams(4))
        )
        with pytest.raises(Overloaded):
            engine.beam_search(tokens(8, 2), beam_width=1, max_tokens=2)
        first.abort()
        (choice,) = first.result().choices
        assert choice.finish_reason in ("abort", "length")
        assert engine.drain(10)
        assert engine.check() == []


def test_an_engine_that_ends_tells_whoever_waits_for_beams(llama: LoadedModel) -> None:
    engine = Engine(llama, kv_memory="1MiB")
    stream = engine.submit(
        tokens(8, 1), SamplingParams(max_tokens=500, ignore_eos=True, beams=BeamParams(4))
    )
    engine.close()
    with pytest.raises(EngineDead):
        stream.result()


def test_weights_that_change_under_a_search_end_it_as_it_began(llama: LoadedModel) -> None:
    """ADMIN-2: nothing that old weights computed is found under the new ones."""
    loaded = load(seed=3)
    with Engine(loaded, kv_memory="1MiB", block_size=4) as engine:
        name = "model.layers.0.mlp.up_proj.weight"
        weight = dict(loaded.model.named_parameters())[name].detach().clone()
        stream = engine.submit(
            tokens(12, 1), SamplingParams(max_tokens=60, ignore_eos=True, beams=BeamParams(3), n=3)
        )
        engine.update_weights({name: weight * 1.5})
        assert len(stream.result().choices) == 3
        fresh = engine.beam_search(tokens(12, 1), beam_width=3, max_tokens=6)
        wanted = expected(loaded, tokens(12, 1), width=3, n=3, max_tokens=6, eos={2})
        assert_same(fresh.beams, wanted, {2})
        assert engine.check() == []


def test_the_likeliest_of_several_draws_are_returned(engine: Engine) -> None:
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 8}
    drawn = engine.generate(tokens(7, 8), n=6, logprobs=0, ignore_eos=True, **asked)
    best = engine.generate(tokens(7, 8), n=2, best_of=6, ignore_eos=True, **asked)

    def mean(logprobs: Any) -> float:
        return float(sum(token.logprob for token in logprobs) / len(logprobs))

    ranked = sorted(drawn.choices, key=lambda choice: -mean(choice.logprobs))
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in ranked[:2]]
    assert [c.score for c in best.choices] == [
        pytest.approx(mean(c.logprobs), abs=1e-6) for c in ranked[:2]
    ]
    assert [c.index for c in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 48  # all that were drawn
    same = engine.generate(tokens(7, 8), n=6, best_of=6, ignore_eos=True, **asked)
    assert [c.token_ids for c in same.choices] == [c.token_ids for c in drawn.choices]


def test_draws_that_are_aborted_return_nothing(engine: Engine) -> None:
    stream = engine.submit(
        tokens(7, 8), SamplingParams(n=2, best_of=4, max_tokens=400, ignore_eos=True)
    )
    stream.abort()
    assert [c.finish_reason for c in stream.result().choices] == ["abort", "abort"]
    with pytest.raises(InvalidRequest, match="best_of"):
        engine.generate(tokens(7, 8), n=2, best_of=1)


def test_draws_may_be_aborted_when_the_first_of_them_is_over_already(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ERRORS-3: whoever leaves takes nobody along."""
    core, step, met = engine._core, engine._core.step, list[Stream]()

    def step_and_abort() -> None:
        step()
        for request in core.in_flight():
            over = {seq.index for seq, _ in request.drawn}
            if 0 in over and request.sequences and request.stream not in met:
                met.append(request.stream)
                request.stream.abort()

    monkeypatch.setattr(core, "step", step_and_abort)
    for seed in range(20):
        params = SamplingParams(
            n=2, best_of=4, max_tokens=60, seed=seed, stop_token_ids=tuple(range(3, 100))
        )
        stream = engine.submit(tokens(7, 8), params)
        reasons = [choice.finish_reason for choice in stream.result().choices]
        assert stream not in met or reasons == ["abort", "abort"]
    assert met and engine.alive and engine.check() == []
