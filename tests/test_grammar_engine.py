"""Answers that must look like something, from engines: valid, as masked logits have them, alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidRequest
from radixkv.service.batch.asks import Asks
from radixkv.service.batch.lines import Line
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.engine.grammar_compile import Grammar, compile_grammar
from radixkv.service.engine.grammar_vocab import Vocabulary
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.params import Generation
from radixkv.service.engine.sampling import ChoiceSampler, SampledToken, sample
from radixkv.service.engine.token_text import TokenText
from radixkv.service.http.serving import Serving
from tests import tiny_models
from tests.stopping_cases import EOS, FALLBACK, spell, stream

PROMPT = "the user said hello to the assistant"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def load(**overrides: Any) -> LoadedModel:
    model, tokenizer = tiny_models.build("llama", **overrides)
    return LoadedModel.from_model(model, tokenizer, name="tiny")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(load(), kv_memory="16MiB", max_batch_tokens=256) as made:
        yield made
        assert made.check() == []


def tiny_vocabulary() -> Vocabulary:
    tokenizer = tiny_models.build_tokenizer()
    return Vocabulary(
        tokenizer, TokenText(tokenizer), vocab_size=320, eos_token_ids=(EOS,), num_threads=2
    )


def held_sampler(grammar: Grammar | None, **how: Any) -> ChoiceSampler:
    return ChoiceSampler(
        SamplingParams(**how),
        index=0,
        prompt_ids=[5, 6],
        vocab_size=320,
        eos_token_ids=(EOS,),
        entropy=0,
        grammar=grammar,
    )


def valid(answer: Generation, schema: Any) -> None:
    for choice in answer.choices:
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(json.loads(choice.text), schema)


# ---- the form is kept ---------------------------------------------------------------------------

_LEAVES = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-200, 200),
        st.integers(0, 300),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": {"a": [1, "é"]}},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "string", "format": "date"},
        ]
    ),
    st.builds(
        lambda options: {"enum": options},
        st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9)), min_size=1, max_size=4),
    ),
)
_NAMES = st.text('abcé"\\ ', min_size=1, max_size=4)


def _object(members: dict[str, Any], optional: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": members,
        "required": [name for name in members if name not in optional],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, more: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + more
            },
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(
            _object, st.dictionaries(_NAMES, inner, max_size=3), st.sets(_NAMES, max_size=2)
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=SCHEMAS, seed=st.integers(0, 999))
def test_every_answer_of_a_random_model_is_valid(engine: Engine, schema: Any, seed: int) -> None:
    answer = engine.generate(
        PROMPT, json_schema=schema, n=3, seed=seed, temperature=1.5, max_tokens=900
    )
    valid(answer, schema)


def test_the_small_model_fills_in_a_form(smollm2: LoadedModel) -> None:
    with Engine(smollm2, kv_memory="64MiB") as small:
        ask = [{"role": "user", "content": "Tell me about a person, in JSON."}]
        first = small.chat(ask, json_schema=PERSON, temperature=0, max_tokens=100)
        valid(first, PERSON)
        assert small.chat(ask, json_schema=PERSON, temperature=0, max_tokens=100) == replaced(first)
        valid(small.chat(ask, json_schema=PERSON, n=3, seed=3, max_tokens=150), PERSON)
        said = small.chat(ask, choice=["yes", "no", "yes and no"], temperature=0, logprobs=2)
        assert said.text in ("yes", "no", "yes and no") and said.finish_reason == "stop"
        assert small.chat(ask, json_object=True, max_tokens=4).text.startswith("{")


def replaced(answer: Generation) -> Any:
    """Equal to an answer that says the same, whatever was cached."""

    class Same:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Generation) and other.choices == answer.choices

    return Same()


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema(PERSON),
        GrammarSpec.regex("(the |and |[a-f]{1,3} ){3,9}"),
        GrammarSpec.choice(["hello the user", "hello the system", "bye"]),
        GrammarSpec.lark('start: "<" /[a-z ]{1,9}/ ">" start?'),
    ],
)
def test_greedy_answers_are_the_likeliest_of_what_is_allowed(
    engine: Engine, spec: GrammarSpec
) -> None:
    """Token by token against transformers' logits and llguidance's mask of bytes, not of bits."""
    model, tokenizer = tiny_models.build("llama")
    matcher = compile_grammar(spec, tiny_vocabulary())._matcher.deep_copy()
    prompt = tokenizer.encode(PROMPT)
    wanted: list[int] = []
    while not matcher.is_stopped() and len(wanted) < 60:
        may = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: len(tokenizer)] > 0
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + wanted])).logits[0, -1].numpy()
        token = int(np.where(may, logits, -np.inf).argmax())
        if token == EOS:
            break
        wanted.append(token)
        assert matcher.consume_token(token)
    got = engine.generate(PROMPT, grammar=spec, temperature=0, max_tokens=60)
    assert list(got.token_ids) == wanted
    assert got.text == tokenizer.decode(wanted)


def test_whoever_has_no_grammar_draws_the_same_to_the_bit_beside_those_that_do() -> None:
    logits = torch.randn(8, 320, generator=torch.Generator().manual_seed(1)) * 3
    grammar = compile_grammar(GrammarSpec.regex("[a-z ]{1,40}"), tiny_vocabulary())
    hows: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_p": 0.8},
        {"temperature": 0.0, "logprobs": 4, "repetition_penalty": 1.2},
    ]

    def draw(held: bool) -> list[list[SampledToken]]:
        samplers = [
            held_sampler(grammar if row < 4 else None, **how)
            for row, how in enumerate([*hows, *hows])
        ]
        kept = samplers if held else samplers[4:]
        rows = torch.cat([logits, logits.flip(1)])[:8]
        return [sample((rows if held else rows[4:]) + step, kept)[-4:] for step in range(6)]

    before = logits.clone()
    assert draw(held=True) == draw(held=False)
    assert torch.equal(logits, before)


# ---- beside the other parameters ----------------------------------------------------------------


def test_choices_go_through_the_grammar_each_for_itself(engine: Engine) -> None:
    answer = engine.generate(PROMPT, regex="[a-z]{3,8}", n=6, seed=5)
    assert len({choice.text for choice in answer.choices}) > 1
    again = engine.generate(PROMPT, regex="[a-z]{3,8}", n=6, seed=5)
    assert again.choices == answer.choices
    alone = engine.generate(PROMPT, regex="[a-z]{3,8}", n=1, seed=5)
    assert alone.choices[0] == answer.choices[0]


def test_an_answer_ends_with_what_completes_it_and_a_cut_one_is_cut(engine: Engine) -> None:
    whole = engine.generate(PROMPT, regex="abc", temperature=0, max_tokens=3)
    assert (whole.text, whole.finish_reason) == ("abc", "stop")
    assert whole.usage.completion_tokens == len(whole.token_ids)  # no token for the end
    cut = engine.generate(PROMPT, regex="a{9}", temperature=0, max_tokens=4)
    assert (cut.text, cut.finish_reason) == ("aaaa", "length")


def test_an_end_that_is_put_off_comes_where_nothing_else_can(engine: Engine) -> None:
    for how in ({"ignore_eos": True}, {"min_tokens": 20}):
        short = engine.generate(PROMPT, regex="ab?", temperature=0, max_tokens=30, **how)
        assert (short.text, short.finish_reason) == ("ab", "stop")
    longer = engine.generate(PROMPT, regex="a*", temperature=0, min_tokens=20, max_tokens=30)
    assert longer.usage.completion_tokens >= 20
    endless = engine.generate(PROMPT, regex="a*", temperature=0, ignore_eos=True, max_tokens=30)
    assert (endless.text, endless.finish_reason) == ("a" * 30, "length")


def test_a_stop_string_ends_an_answer_that_is_not_complete(engine: Engine) -> None:
    answer = engine.generate(PROMPT, regex="abcdefgh", temperature=0, stop="def")
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    assert answer.choices[0].stop_reason == "def"


def test_penalties_and_biases_choose_among_what_is_allowed(engine: Engine) -> None:
    a = engine.tokenize("a")[0]
    biased = engine.generate(PROMPT, regex="[ab]{4}", temperature=0, logit_bias={a: 100.0})
    assert biased.text == "aaaa"
    forbidden = engine.generate(PROMPT, regex="a{2}", temperature=0, logit_bias={a: -100.0})
    assert forbidden.text == "aa"


def test_penalties_count_what_the_grammar_let_through() -> None:
    grammar = compile_grammar(GrammarSpec.regex("[ab]{4}"), tiny_vocabulary())
    a, b, c = (spell(letter)[0] for letter in "abc")
    logits = torch.zeros(1, 320)
    logits[0, [a, b, c]] = torch.tensor([1.5, 1.0, 9.0])
    one = held_sampler(grammar, temperature=0.0, presence_penalty=2.0)
    assert [sample(logits, [one])[0].token_id for _ in range(4)] == [a, b, a, a]


def test_logprobs_are_the_models_own_before_the_grammar(engine: Engine) -> None:
    free = engine.generate(PROMPT, temperature=0, max_tokens=1, logprobs=5)
    held = engine.generate(PROMPT, regex="zq", temperature=0, logprobs=5)
    assert free.choices[0].logprobs and held.choices[0].logprobs
    assert held.choices[0].logprobs[0].top == free.choices[0].logprobs[0].top
    assert held.choices[0].logprobs[0].logprob < held.choices[0].logprobs[0].top[-1][3]


def test_a_preempted_choice_goes_on_in_its_grammar() -> None:
    """Six answers grow in a pool that has room for three or so."""
    specs = [GrammarSpec.regex(f"({word} [a-z]{{1,5}} ){{12,14}}") for word in ("the", "and", "to")]

    def answers(**settings: Any) -> tuple[list[Any], int]:
        with Engine(load(), max_model_len=256, lookahead_tokens=0, **settings) as engine:
            asked = [
                engine.stream_generate([9 + i] * 40, grammar=specs[i % 3], seed=i, max_tokens=160)
                for i in range(6)
            ]
            found = [stream.result().choices for stream in asked]
            assert engine.check() == []
            return found, engine.stats().preemptions_total

    roomy, none = answers(kv_memory="16MiB")
    assert none == 0
    for swap in (0, "8MiB"):
        tight, preempted = answers(kv_memory="208KiB", swap_memory=swap)
        assert preempted > 0
        assert tight == roomy


def test_an_aborted_answer_leaves_nothing_behind(engine: Engine) -> None:
    stream = engine.stream_generate(PROMPT, regex="a{500}", temperature=0)
    next(iter(stream))
    stream.abort()
    assert stream.result().finish_reason == "abort"
    assert engine.check() == []


# ---- what fails ---------------------------------------------------------------------------------


def test_a_bad_grammar_is_refused_before_anything_is_queued(engine: Engine) -> None:
    before = engine.stats().requests_total
    for bad in ({"regex": "("}, {"json_schema": {"type": "x"}}, {"lark": 'start: "a" start'}):
        with pytest.raises(InvalidRequest):
            engine.generate(PROMPT, **bad)
    assert engine.stats().requests_total == before


def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(engine: Engine) -> None:
    hostile = GrammarSpec.lark('start: s\ns: s s | s s s | "a" |')
    other = engine.stream_generate(PROMPT, regex="b{30}", temperature=0)
    with pytest.raises(InvalidRequest, match="cannot be followed any further"):
        engine.generate(PROMPT, grammar=hostile, temperature=0, ignore_eos=True, max_tokens=400)
    assert other.result().text == "b" * 30


def test_coroutines_may_ask_too(engine: Engine) -> None:
    async def ask() -> Generation:
        with pytest.raises(InvalidRequest, match="unclosed"):
            await engine.agenerate(PROMPT, regex="(")
        return await engine.agenerate(PROMPT, json_schema=PERSON, seed=1, max_tokens=900)

    valid(asyncio.run(ask()), PERSON)


def test_a_tokenizer_with_byte_fallback_is_held_too() -> None:
    """Llama 2's way: the first token's leading space is not in the text, so it does not come."""
    tokenizer = FALLBACK._tokenizer
    size = len(tokenizer)
    model, _ = tiny_models.build("llama", vocab_size=size)
    with Engine(LoadedModel.from_model(model, tokenizer, name="spm"), kv_memory="8MiB") as engine:
        for seed in range(3):
            answer = engine.generate([5, 6], json_schema=PERSON, seed=seed, max_tokens=900)
            valid(answer, PERSON)
            said = engine.generate([5, 6], regex="(the|a| ){3,5}", seed=seed)
            assert not said.text.startswith(" ")


def test_a_final_token_ends_a_choice_with_all_of_its_text() -> None:
    choice = stream(min_tokens=9, ignore_eos=True)
    assert choice.push(SampledToken(spell("a")[0])) is not None
    last = choice.push(SampledToken(spell("b")[0], final=True))
    assert last is not None and (last.text, last.finish_reason) == ("b", "stop")
    ended = stream(ignore_eos=True)
    assert ended.push(SampledToken(EOS, final=True)) is not None
    assert ended.choice().token_ids == () and ended.choice().finish_reason == "stop"


def test_a_line_of_a_batch_is_held_and_refused_like_a_request(engine: Engine) -> None:
    serving = Serving()
    serving.start(engine)
    try:
        asks = Asks(serving)
        body = {"prompt": PROMPT, "max_tokens": 9, "guided_choice": ["yes", "no"]}
        good = asks.parse(Line(1, 0, "a", "/v1/completions", body))
        asks.prompts(good)
        assert good.params.grammar == GrammarSpec.choice(["yes", "no"])
        assert engine.grammars.is_kept(GrammarSpec.choice(["yes", "no"]), good.origin.tenant)
        broken = {"prompt": PROMPT, "regex": "("}
        bad = asks.parse(Line(2, 9, "b", "/v1/completions", broken))
        with pytest.raises(InvalidRequest, match="unclosed"):
            asks.prompts(bad)
    finally:
        serving.stop()
