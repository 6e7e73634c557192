"""A choice's text and end: stop strings never leak, tokens are listed when their text is out."""

from __future__ import annotations

import pytest

from radixkv.service.engine.params import Choice
from tests.stopping_cases import AND, EOS, FALLBACK, run, said, spell, stream


def test_half_a_stop_string_is_never_said() -> None:
    """STREAM-1: stop=['own fox'] crosses tokens."""
    deltas, whole = run(stream(stop=("own fox",)), spell("the brown fox jumps"))
    assert whole.text == "the br"
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "own fox")
    assert "".join(said(deltas)) == "the br"
    assert whole.token_ids == tuple(spell("the br"))


def test_what_only_looked_like_a_stop_string_is_said_after_all() -> None:
    deltas, whole = run(stream(stop=("END",)), [*spell("xENx"), EOS])
    assert said(deltas) == ["x", "", "", "ENx", ""]
    assert [d.token_ids if d else None for d in deltas] == [
        tuple(spell("x")),
        None,
        None,
        tuple(spell("ENx")),
        (),
    ]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_no_token_of_a_stop_string_is_listed(logprobs: int | None) -> None:
    """LOGPROBS-2: stop=['END'] with logprobs, stream; ' and' straddles another stop string."""
    _, whole = run(stream(stop=("END",), logprobs=logprobs), spell("go END on"))
    assert whole.text == "go " and whole.token_ids == tuple(spell("go "))
    deltas, whole = run(stream(stop=("nd",), logprobs=logprobs), [*spell("go"), AND])
    assert whole.text == "go a" and whole.token_ids == tuple(spell("go"))
    assert said(deltas)[-1] == " a"


def test_with_logprobs_text_waits_for_whole_tokens() -> None:
    """LOGPROBS-2: in every chunk the tokens join to the text."""
    deltas, _ = run(stream(stop=("ndX",), logprobs=0), [AND, *spell("y")])
    assert said(deltas) == ["", " andy", ""]
    deltas, _ = run(stream(stop=("ndX",)), [AND, *spell("y")])
    assert said(deltas) == [" a", "ndy", ""]


def test_a_stop_inside_a_character_split_over_tokens_is_found() -> None:
    ids = spell("a日😀本")
    deltas, whole = run(stream(stop=("😀",)), ids)
    assert whole.text == "a日" and whole.finish_reason == "stop"
    assert whole.token_ids == tuple(spell("a日"))
    assert all("�" not in piece for piece in said(deltas))


def test_the_stop_string_that_is_complete_first_wins() -> None:
    _, whole = run(stream(stop=("bcd", "c")), spell("abcd"))
    assert (whole.text, whole.stop_reason) == ("ab", "c")
    _, whole = run(stream(stop=("cd", "bcd")), spell("abcd"))
    assert (whole.text, whole.stop_reason) == ("a", "bcd")


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", "[a-z]", ".*", "\n\n", " "])
def test_a_stop_string_is_taken_literally(stop: str) -> None:
    _, whole = run(stream(stop=(stop, "never")), spell(f"b{stop}c"))
    assert (whole.text, whole.stop_reason) == ("b", stop)


def test_eos_stop_tokens_and_length_each_say_how_the_choice_ended() -> None:
    _, whole = run(stream(), [*spell("ab"), EOS])
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ab", "stop", None)
    assert whole.token_ids == tuple(spell("ab"))
    b = spell("b")[0]
    choice = stream(stop_token_ids=(b,))
    _, whole = run(choice, spell("aab"))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("aa", "stop", b)
    assert choice.num_tokens == 3 and len(whole.token_ids) == 2
    _, whole = run(stream(max_tokens=2), spell("aab"))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("aa", "length", None)


def test_with_ignore_eos_eos_is_listed_and_adds_no_text() -> None:
    _, whole = run(stream(ignore_eos=True, max_tokens=3, logprobs=0), [*spell("a"), EOS, EOS])
    assert (whole.text, whole.finish_reason) == ("a", "length")
    assert whole.token_ids == (*spell("a"), EOS, EOS)
    assert whole.logprobs is not None and whole.logprobs[1].token == "<|im_end|>"


def test_before_min_tokens_a_stop_string_is_text_like_any_other() -> None:
    _, whole = run(stream(stop=("b",), min_tokens=4), spell("abaab"))
    assert whole.text == "abaa"
    _, whole = run(stream(stop=("ba",), min_tokens=3), spell("abab"))  # complete with token 3
    assert whole.text == "a"


def test_held_text_is_said_when_tokens_run_out_or_the_choice_is_aborted() -> None:
    deltas, whole = run(stream(stop=("END",), max_tokens=3), spell("xEN"))
    assert said(deltas) == ["x", "", "EN"] and whole.finish_reason == "length"
    deltas, whole = run(stream(stop=("END",)), spell("xEN"), end="abort")
    assert said(deltas)[-1] == "EN" and whole.finish_reason == "abort"
    assert whole.token_ids == tuple(spell("xEN"))
    deltas, whole = run(stream(), spell("é")[:1], end="abort")
    assert whole.text == "�" and whole.token_ids == tuple(spell("é")[:1])


def test_a_stop_string_that_comes_out_of_the_last_held_bytes_still_counts() -> None:
    run_of_bytes = [9 + b for b in "a😀".encode()]
    choice = stream(FALLBACK, stop=("😀",), max_tokens=len(run_of_bytes))
    _, whole = run(choice, run_of_bytes)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("a", "stop", "😀")


def test_a_choice_that_never_began_can_be_ended() -> None:
    choice = stream(logprobs=1)
    delta = choice.end("abort")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), "abort")
    assert choice.choice() == Choice(0, "", (), "abort", logprobs=())
