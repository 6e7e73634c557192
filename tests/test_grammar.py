"""What an answer must look like: checked cheaply, compiled once, and refused before it costs."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pydantic
import pytest

from radixkv.errors import InvalidRequest, Overloaded
from radixkv.service.engine import grammar_compile
from radixkv.service.engine.grammar import MAX_SOURCE_CHARS, MAX_WORD_CHARS, GrammarSpec
from radixkv.service.engine.grammar_compile import Grammars, compile_grammar
from radixkv.service.engine.grammar_state import GrammarState, allowed_bits
from radixkv.service.engine.grammar_turns import MAX_RUNNING_OF_TENANT, MAX_WAITING_OF_TENANT
from radixkv.service.engine.grammar_vocab import Vocabulary
from radixkv.service.engine.params import SamplingParams, sampling_params
from radixkv.service.engine.token_text import TokenText
from tests.tiny_models import build_tokenizer

EOS = 2
TOKENIZER = build_tokenizer()
VOCAB = 320
"""More than the tokenizer has, as of models whose rows of logits are padded."""


def build_vocabulary(tokenizer: Any = TOKENIZER, eos: tuple[int, ...] = (EOS,)) -> Vocabulary:
    return Vocabulary(
        tokenizer, TokenText(tokenizer), vocab_size=VOCAB, eos_token_ids=eos, num_threads=1
    )


VOCABULARY = build_vocabulary()


def state(spec: GrammarSpec, vocabulary: Vocabulary = VOCABULARY, **how: Any) -> GrammarState:
    put_off = np.array(sorted(vocabulary.eos), np.int64)
    return compile_grammar(spec, vocabulary).start(put_off=put_off, **how)


def allowed(at: GrammarState) -> set[int]:
    (row,) = allowed_bits([at])
    assert at.error is None, at.error
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether ``text`` can be written token by token, and may end there."""
    at = state(spec)
    final = False
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if final or token not in allowed(at):
            return False
        final = at.take(token)
    return final or EOS in allowed(at)


# ---- what may be said ---------------------------------------------------------------------------


def test_each_kind_accepts_what_it_says_and_nothing_else() -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for spec, right, wrong in (
        (GrammarSpec.json_object(), ["{}", '{"a": [1, null, "é\\n"]}'], ["[]", "1", "{", " {}"]),
        (
            GrammarSpec.json_schema(person),
            ['{"name":"B","age":1}', '{\n  "name": "",\n  "age": -20\n}'],
            ["{}", '{"name":"B"}', '{"name":1,"age":1}', '{"name":"B","age":1.5}'],
        ),
        (GrammarSpec.regex(r"a+(b|cd)?"), ["a", "aaab", "acd"], ["", "b", "ac", "abb"]),
        (GrammarSpec.regex(r"^(yes|no)$"), ["yes", "no"], ["", "yesno"]),
        (GrammarSpec.choice(["yes", "yes please", 'a"\\\n漢']), ["yes", "yes please", 'a"\\\n漢'],
         ["ye", "yes p", "no"]),
        (GrammarSpec.lark('start: "a" start | "b"'), ["b", "aaab"], ["", "a", "ba"]),
        (GrammarSpec.lark('root ::= "a" root | "b"'), ["b", "aaab"], ["", "a", "ba"]),
        (GrammarSpec.json_schema(True), ["1", '"a"', "[{}]"], ["", "a"]),
    ):  # fmt: skip
        for text in right:
            assert accepts(spec, text), (spec, text)
        for text in wrong:
            assert not accepts(spec, text), (spec, text)


def test_white_space_in_json_cannot_run_on_unless_the_schema_says_so() -> None:
    spec = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
    assert accepts(spec, "[1, 2]") and accepts(spec, "[\n  1,\n  2\n]")
    assert not accepts(spec, "[1,      2]") and not accepts(spec, "[1,\n\n2]")
    free = {"type": "array", "items": {"type": "integer"}, "x-guidance": {}}
    free["x-guidance"] = {"whitespace_pattern": r"[ \n]*"}
    assert accepts(GrammarSpec.json_schema(free), "[1,      2]")


def test_a_schema_is_a_mapping_its_text_or_a_model_and_keeps_its_order() -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    schema = Person.model_json_schema()
    specs = [GrammarSpec.json_schema(one) for one in (Person, schema, json.dumps(schema))]
    assert all(accepts(spec, '{"name":"B","age":1}') for spec in specs)
    assert not any(accepts(spec, '{"age":1,"name":"B"}') for spec in specs)


def test_keywords_of_the_library_become_a_grammar_and_only_one_may_be_given() -> None:
    told = sampling_params({"regex": "a+", "max_tokens": 3})
    assert told == SamplingParams(grammar=GrammarSpec.regex("a+"), max_tokens=3)
    assert sampling_params({"json_object": True}).grammar == GrammarSpec.json_object()
    assert sampling_params({"choice": ["a"], "json_schema": None}).grammar is not None
    assert sampling_params({"json_object": False}).grammar is None
    for two in (
        {"regex": "a", "choice": ["a"]},
        {"regex": "a", "grammar": GrammarSpec.json_object()},
    ):
        with pytest.raises(InvalidRequest, match="wanted one of them"):
            sampling_params(two)
    with pytest.raises(InvalidRequest, match="a GrammarSpec"):
        SamplingParams(grammar="a+")  # type: ignore[arg-type]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("regex", "", "is empty"),
        ("regex", "a" * (MAX_WORD_CHARS + 1), "at most"),
        ("choice", "[]", "no options"),
        ("choice", '["a", ""]', "an empty one"),
        ("choice", '["a", 1]', "no list of strings"),
        ("choice", json.dumps(["a"] * 5000), "at most"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", "[]", "is no schema"),
        ("json_schema", '"x"', "is no schema"),
        ("json_schema", json.dumps({"const": "a" * (MAX_WORD_CHARS + 1)}), "a string of"),
        ("json_schema", json.dumps({"a" * (MAX_WORD_CHARS + 1): {}}), "a string of"),
        ("json_schema", '{"items":' * 80 + "{}" + "}" * 80, "levels deep"),
        ("json_schema", "[" * 100_000 + "]" * 20_000, "is no JSON"),
        ("lark", "x" * (MAX_SOURCE_CHARS + 1), "at most"),
        ("prose", "a", "grammar kind"),
    ],
)
def test_a_spec_is_refused_before_anything_is_compiled(kind: Any, source: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        GrammarSpec(kind, source)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GrammarSpec.regex("(a"), "unclosed group"),
        (GrammarSpec.regex(r"(a)\1"), "backreferences are not supported"),
        (GrammarSpec.regex("a(?=b)"), "look-around"),
        (GrammarSpec.regex(r"[^\s\S]"), "no text can look like that"),
        (GrammarSpec.json_schema({"type": "strnig"}), "Invalid type: strnig"),
        (GrammarSpec.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (GrammarSpec.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (GrammarSpec.json_schema({"$ref": "https://a.example/b"}), "does not fetch"),
        (GrammarSpec.json_schema({"$ref": "#"}), "no answer could ever end"),
        (GrammarSpec.json_schema({"pattern": "(", "type": "string"}), "unclosed group"),
        (GrammarSpec.lark('start: "a'), "lexer error"),
        (GrammarSpec.lark('begin: "a"'), "no start rule"),
        (GrammarSpec.lark('start: "a" start'), "no answer could ever end"),
        (GrammarSpec.lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "too deeply nested"),
        (GrammarSpec.lark('root ::= "a" ) "b"'), "no GBNF"),
        (GrammarSpec.lark("root ::= " + "(" * 6000 + '"a"' + ")" * 6000), "no GBNF"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_with_the_reason(spec: GrammarSpec, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        compile_grammar(spec, VOCABULARY)


def chains() -> dict[str, GrammarSpec]:
    """Grammars whose references reach so far that a thread's usual stack would not do."""
    far = 1500
    refs: dict[str, Any] = {
        f"r{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/r{i + 1}"}}}
        for i in range(far)
    }
    rules = "\n".join(f'r{i}: "x" r{i + 1}' for i in range(6000))
    return {
        "schema": GrammarSpec.json_schema(
            {"$defs": refs | {f"r{far}": {"type": "string"}}, "$ref": "#/$defs/r0"}
        ),
        "lark": GrammarSpec.lark(f'start: r0\n{rules}\nr6000: "y"'),
    }


@pytest.mark.parametrize("name", ["schema", "lark"])
def test_a_chain_of_references_does_not_end_the_process(name: str) -> None:
    grammar = Grammars(lambda: VOCABULARY).compiled(chains()[name], "local")
    at = grammar.start(put_off=np.empty(0, np.int64))
    for _ in range(50):
        if at.take(min(allowed(at) - {EOS}, default=EOS)):
            break


def test_patterns_that_are_slow_elsewhere_are_matched_step_by_step() -> None:
    for pattern in ("(a+)+b", "(a|aa)+b", "(.*a.{12})b", "(a?){9999}b"):
        at = state(GrammarSpec.regex(pattern))
        for _ in range(100):
            token = TOKENIZER.encode("a", add_special_tokens=False)[0]
            assert token in allowed(at), pattern
            at.take(token)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.lark('start: s\ns: s s | s s s | "a" |'),
        GrammarSpec.regex("((a{1,1000}){1,1000}){1,1000}b"),
    ],
)
def test_a_grammar_too_complex_to_go_on_fails_alone(spec: GrammarSpec) -> None:
    hostile = state(spec)
    tame = state(GrammarSpec.regex("a*"))
    a = TOKENIZER.encode("a", add_special_tokens=False)[0]
    for _ in range(200):
        bits = allowed_bits([hostile, tame])
        if hostile.error is not None:
            break
        hostile.take(a)
        tame.take(a)
    assert hostile.error is not None
    assert "items" in hostile.error or "too many" in hostile.error
    assert tame.error is None and allowed(tame) >= {a, EOS}
    assert (bits[0] == -1).all()  # the row is left as it is


# ---- the end ------------------------------------------------------------------------------------


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    at = state(GrammarSpec.regex("ab*"))
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert EOS not in allowed(at)
    assert not at.take(a)
    assert allowed(at) == {b, EOS}
    assert not at.take(b)
    assert at.take(EOS)


def test_a_token_after_which_nothing_can_come_is_the_last() -> None:
    at = state(GrammarSpec.regex("ab"))
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert not at.take(a)
    assert at.take(b)


def test_the_end_is_put_off_where_anything_else_is_left() -> None:
    for how in ({"min_tokens": 2}, {"ignore_eos": True}):
        at = state(GrammarSpec.regex("a*"), **how)
        a = TOKENIZER.encode("a", add_special_tokens=False)[0]
        for _ in range(2):
            assert EOS not in allowed(at)
            at.take(a)
        assert (EOS in allowed(at)) is ("min_tokens" in how)
    only_end = state(GrammarSpec.lark('start: "a"?'), ignore_eos=True)
    only_end.take(a)
    assert allowed(only_end) == {EOS}


def test_special_tokens_come_only_where_a_grammar_names_them() -> None:
    free = state(GrammarSpec.regex(r"(?s:.)*"))
    assert allowed(free).isdisjoint({0, 1}) and EOS in allowed(free)
    assert max(allowed(free)) < len(TOKENIZER)
    named = state(GrammarSpec.lark('start: <|im_start|> "a"'))
    assert allowed(named) == {1}


def test_a_model_without_an_end_of_sequence_ends_where_nothing_can_come() -> None:
    at = state(GrammarSpec.regex("ab?"), build_vocabulary(eos=()))
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert {t for t in allowed(at) if t < VOCAB} == {a}
    assert not at.take(a)
    assert at.take(b)


# ---- compiled once ------------------------------------------------------------------------------


def test_one_compilation_serves_all_who_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, compiled = GrammarSpec.regex("a+"), []
    gate, real = threading.Event(), compile_grammar

    def slow(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
        compiled.append(spec)
        assert gate.wait(20)
        return real(spec, vocabulary)

    monkeypatch.setattr(grammar_compile, "compile_grammar", slow)
    grammars = Grammars(lambda: VOCABULARY)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(grammars.compiled, spec, "one") for _ in range(4)]
        other = threads.submit(grammars.compiled, spec, "two")
        gate.set()
        found = [future.result(20) for future in asked]
        assert other.result(20) is not found[0]  # what one tenant asks for another cannot tell
    assert all(grammar is found[0] for grammar in found)
    assert compiled == [spec, spec]


def test_refusals_are_kept_too_and_are_each_callers_own() -> None:
    grammars = Grammars(lambda: VOCABULARY)
    refused = []
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed") as caught:
            grammars.compiled(GrammarSpec.regex("("), "local")
        refused.append(caught.value)
    assert refused[0] is not refused[1]
    with pytest.raises(InvalidRequest) as named:
        asyncio.run(grammars.compile_beside(GrammarSpec.regex("("), "local", "guided_regex"))
    assert named.value.param == "guided_regex" and refused[0].param == "grammar"


def test_a_tenants_many_slow_grammars_keep_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, real = threading.Event(), compile_grammar

    def slow(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
        assert not spec.source.startswith("s") or gate.wait(60)
        return real(spec, vocabulary)

    monkeypatch.setattr(grammar_compile, "compile_grammar", slow)
    grammars = Grammars(lambda: VOCABULARY)

    async def ask() -> None:
        asked = [
            asyncio.create_task(grammars.compile_beside(GrammarSpec.regex(f"s{{{i}}}"), "one"))
            for i in range(1, MAX_RUNNING_OF_TENANT + MAX_WAITING_OF_TENANT + 1)
        ]
        await asyncio.sleep(0)  # each has asked
        with pytest.raises(Overloaded, match="wait to be compiled"):
            await grammars.compile_beside(GrammarSpec.regex("st"), "one")
        await grammars.compile_beside(GrammarSpec.regex("quick"), "two")
        assert grammars.is_kept(GrammarSpec.regex("quick"), "two")
        assert not any(task.done() for task in asked)
        gate.set()
        await asyncio.gather(*asked)

    try:
        asyncio.run(ask())
    finally:
        gate.set()


def test_what_is_kept_is_bounded_and_the_latest_used_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compile, "MAX_KEPT", 3)
    grammars = Grammars(lambda: VOCABULARY)
    specs = [GrammarSpec.regex(f"a{{{i}}}b") for i in range(1, 6)]
    first = grammars.compiled(specs[0], "local")
    for spec in specs[1:]:
        grammars.compiled(spec, "local")
        assert grammars.compiled(specs[0], "local") is first
    assert [grammars.is_kept(spec, "local") for spec in specs] == [True, False, False, True, True]
    monkeypatch.setattr(grammar_compile, "MAX_KEPT_CHARS", 1)
    last = GrammarSpec.regex("c")
    grammars.compiled(last, "local")
    assert [grammars.is_kept(spec, "local") for spec in [*specs, last]] == [False] * 5 + [True]


def test_what_one_tenant_has_compiled_makes_no_other_compile_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the time of one's own grammar tell that others have asked for theirs."""
    monkeypatch.setattr(grammar_compile, "MAX_KEPT", 6)
    grammars = Grammars(lambda: VOCABULARY)
    mine = GrammarSpec.regex("mine")
    grammars.compiled(mine, "one")
    for i in range(12):
        grammars.compiled(GrammarSpec.regex(f"x{i}"), "two")
    assert grammars.is_kept(mine, "one")
    assert [i for i in range(12) if grammars.is_kept(GrammarSpec.regex(f"x{i}"), "two")] == [
        7, 8, 9, 10, 11
    ]  # fmt: skip


def test_a_tokenizer_whose_tokens_are_no_pieces_of_text_is_refused() -> None:
    class Odd:
        def __len__(self) -> int:
            return 3

        all_special_tokens: tuple[str, ...] = ()

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [f"t{i}" for i in ids]

    with pytest.raises(InvalidRequest, match="cannot be held to a form"):
        build_vocabulary(Odd())


def test_long_forced_text_is_cut_into_the_models_own_tokens_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "the user said hello to the assistant in the system. " * 12
    found = []
    for most in (10**6, 64):
        monkeypatch.setattr("radixkv.service.engine.grammar_vocab._MAX_CUT_BYTES", most)
        at = state(GrammarSpec.json_schema({"const": text}), build_vocabulary())
        ids: list[int] = []
        while True:
            (token,) = allowed(at)
            ids.append(token)
            if at.take(token):
                break
        found.append(ids)
    assert found[0] == found[1]
    assert TOKENIZER.decode(found[0]) == json.dumps(text)
    assert len(found[0]) < len(text) * 0.6
