"""The grammar of calls takes what the parser reads and templates write, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import llguidance.hf
import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import GrammarSpec
from radixkv.service.tools_formats import FORMATS, FormatName, Mistral, ToolFormat, format_of
from radixkv.service.tools_grammar import Function, calls_grammar
from radixkv.service.tools_parsing import parse
from tests.tiny_models import build_tokenizer
from tests.tool_cases import ADD, WEATHER, written

TOKENIZER = build_tokenizer()
LL_TOKENIZER = llguidance.hf.from_tokenizer(TOKENIZER)
FUNCTIONS = [
    Function(tool["function"]["name"], tool["function"]["parameters"]) for tool in (ADD, WEATHER)
]
GOOD = ("add", {"a": 7})
OTHER = ("get_weather", {"city": "Oslo", "days": 2})


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    matcher = llguidance.LLMatcher(LL_TOKENIZER, spec.source)
    assert not matcher.get_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(name: FormatName, **options: Any) -> GrammarSpec:
    how = format_of(None, name)
    assert how is not None
    given: dict[str, Any] = {"special": {}, "forced": True, "several": True} | options
    return calls_grammar(how, FUNCTIONS, **given)


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_answer_is_calls_that_keep_to_their_schemas(name: FormatName) -> None:
    forced = grammar(name)
    assert accepts(forced, written(name, [GOOD], {}))
    assert accepts(forced, written(name, [OTHER, GOOD, OTHER], {}))
    assert not accepts(grammar(name, several=False), written(name, [GOOD, GOOD], {}))
    for bad in (
        ("add", {"a": "7"}),
        ("add", {"a": 70}),
        ("add", {"a": 7, "b": 1}),
        ("add", {}),
        ("get_weather", {"city": "Rome", "days": 2}),
        ("nobody", {}),
    ):
        assert not accepts(forced, written(name, [bad], {}))
    assert not accepts(forced, "")
    assert not accepts(forced, "hello " + written(name, [GOOD], {}))


@pytest.mark.parametrize("name", FORMATS)
def test_json_is_spaced_as_templates_space_it(name: FormatName) -> None:
    """So that the call is the same tokens when it comes back in the history."""
    forced = grammar(name)
    assert accepts(forced, written(name, [OTHER], {}))
    assert not accepts(forced, written(name, [OTHER], {"separators": (",", ":")}))
    assert not accepts(forced, written(name, [OTHER], {"indent": 1}))


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_functions_that_are_allowed_are_called(name: FormatName) -> None:
    only = grammar(name, only={"add"})
    assert accepts(only, written(name, [GOOD], {}))
    assert not accepts(only, written(name, [OTHER], {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_free_answer_is_any_text_but_calls_keep_to_their_schemas(name: FormatName) -> None:
    free = grammar(name, forced=False)
    for text in ("", "hello you", "a < b [x] \n and so on"):
        assert accepts(free, text)
    assert accepts(free, written(name, [GOOD, OTHER], {}))
    assert not accepts(free, written(name, [("add", {"a": "x"})], {}))
    if name != "llama3_json":
        assert accepts(free, "Let me see.\n" + written(name, [GOOD], {}))
        assert not accepts(free, "So: " + written(name, [("add", {"a": "x"})], {}))


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_in_the_place_of_text_there_may_be_json_that_was_asked_for(name: FormatName) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    either = grammar(name, forced=False, answer=GrammarSpec.json_schema(schema))
    assert accepts(either, '{"x": 3}')
    assert accepts(either, written(name, [GOOD], {}))
    assert not accepts(either, "hello")
    anything = grammar(name, forced=False, answer=GrammarSpec.json_object())
    assert accepts(anything, '{"y": [1]}') and accepts(anything, written(name, [GOOD], {}))


@pytest.mark.parametrize(
    "name, answer, why",
    [
        ("hermes", GrammarSpec.regex("a+"), "regex"),
        ("llama3_json", GrammarSpec.json_object(), "plain JSON"),
    ],
)
def test_what_cannot_be_told_from_calls_is_refused(
    name: FormatName, answer: GrammarSpec, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        grammar(name, forced=False, answer=answer)


def test_markers_that_are_special_tokens_are_tokens() -> None:
    """The tiny tokenizer's own specials stand in for the family's."""
    rules = grammar("mistral", special={"[TOOL_CALLS]": 1}).source
    assert '<[1]> "["' in rules and "TOOL_CALLS" not in rules
    free = grammar("mistral", special={"[TOOL_CALLS]": 1}, forced=False)
    ids = TOKENIZER.encode("so ", add_special_tokens=False) + [1]
    call = '[{"name": "add", "arguments": {"a": 1}}]'
    for text, good in ((call, True), ("[1]", False)):
        matcher = llguidance.LLMatcher(LL_TOKENIZER, free.source)
        whole = ids + TOKENIZER.encode(text, add_special_tokens=False)
        assert (matcher.try_consume_tokens(whole) == len(whole)) is good


@pytest.mark.parametrize("how", [Mistral(named=True), Mistral(spaced=True)])
def test_what_the_grammars_of_mistrals_other_forms_take_is_read(how: ToolFormat) -> None:
    spec = calls_grammar(how, FUNCTIONS, special={}, forced=True, several=True)
    before, after = how.around("add")
    call = f'{before}{{"a": 7}}{after}'
    text = how.opening + call + how.between + call + how.closing
    assert accepts(spec, text)
    made = parse(how.parser(["add"]), text).calls
    assert [(one.name, json.loads(one.arguments)) for one in made] == [GOOD, GOOD]


def test_a_function_without_parameters_takes_none() -> None:
    how = format_of(None, "hermes")
    assert how is not None
    spec = calls_grammar(how, [Function("f")], special={}, forced=True, several=False)
    assert accepts(spec, written("hermes", [("f", {})], {}))
    assert not accepts(spec, written("hermes", [("f", {"a": 1})], {}))


def test_arguments_that_are_no_object_are_refused_by_their_place() -> None:
    how = format_of(None, "hermes")
    assert how is not None
    wrong = Function("f", {"type": "string"}, at="tools[3].function.parameters")
    with pytest.raises(InvalidRequest) as caught:
        calls_grammar(how, [wrong], special={}, forced=True, several=False)
    assert caught.value.param == "tools[3].function.parameters"


def test_a_strict_schema_must_be_kept_to_the_letter_and_another_as_far_as_it_goes() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedItems": False}
    how = format_of(None, "hermes")
    assert how is not None
    loose, strict = (
        calls_grammar(how, [Function("f", odd, s)], special={}, forced=True, several=False)
        for s in (False, True)
    )
    assert accepts(loose, written("hermes", [("f", {"a": "b"})], {}))
    assert llguidance.LLMatcher(LL_TOKENIZER, strict.source).get_error()
