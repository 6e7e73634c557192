"""A choice's text and end: stop strings never leak, tokens are listed when their text is out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.service.engine.detokenize import Detokenizer, TokenText
from radixkv.service.engine.params import Choice, Delta, SamplingParams
from radixkv.service.engine.sampling import SampledToken
from radixkv.service.engine.stop_strings import StopMatcher
from radixkv.service.engine.stopping import ChoiceStream
from tests.tiny_models import build_tokenizer

EOS = 2
BYTES = TokenText(build_tokenizer())


def with_byte_fallback() -> TokenText:
    words = ["<s>", "</s>", "<eos>", "▁the", "th", "a", "ab", "b", "▁"]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(words[:3])
    return TokenText(
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, clean_up_tokenization_spaces=False
        )
    )


FALLBACK = with_byte_fallback()
_OF_BYTE = {
    raw[0]: i for i in range(3, 259) if len(raw := BYTES.token_bytes(i)) == 1
}  # the tiny tokenizer's

AND = next(i for i in range(259, 400) if BYTES.token_bytes(i) == b" and")


def spell(text: str) -> list[int]:
    """One token a byte."""
    return [_OF_BYTE[b] for b in text.encode()]


def stream(text: TokenText = BYTES, max_tokens: int = 100, **params: Any) -> ChoiceStream:
    return ChoiceStream(
        0, SamplingParams(**params), text, eos_token_ids=(EOS,), max_tokens=max_tokens
    )


def run(
    choice: ChoiceStream, token_ids: Sequence[int], end: Any = "length"
) -> tuple[list[Delta | None], Choice]:
    """Push tokens until the choice has finished, or end it."""
    deltas: list[Delta | None] = []
    for token_id in token_ids:
        deltas.append(choice.push(SampledToken(token_id, -1.0, ((token_id, -1.0),))))
        if choice.finished:
            break
    else:
        deltas.append(choice.end(end))
    return deltas, choice.choice()


def said(deltas: Sequence[Delta | None]) -> list[str]:
    return [delta.text if delta else "" for delta in deltas]


# ---- the dull model -----------------------------------------------------------------------------


class Dull:
    """Knows the whole text from the start, looks at it again for every token, cuts it once."""

    def __init__(self, text: TokenText, token_ids: list[int], params: SamplingParams, most: int):
        detokenizer = Detokenizer(text)
        self.visible = [""]  # after each token
        for token_id in token_ids:
            self.visible.append(self.visible[-1] + detokenizer.push(token_id))
        self.params, self.text = params, text
        self.token_ids = token_ids
        self.num_tokens, self.answer, self.reason, self.stop = self._cut(most)

    def _cut(self, most: int) -> tuple[int, str, str, int | str | None]:
        params = self.params
        for n, token_id in enumerate(self.token_ids, 1):
            if n > params.min_tokens:
                if token_id == EOS and not params.ignore_eos:
                    return self._end(n, n - 1, "stop", None)
                if token_id in params.stop_token_ids:
                    return self._end(n, n - 1, "stop", token_id)
            found = self._match(self.visible[n], len(self.visible[n - 1]), n)
            if found:
                return n, self.visible[n][: found[0]], "stop", found[1]
            if n == most:
                return self._end(n, n, "length", None)
        n = len(self.token_ids)
        return self._end(n, n, "length", None)

    def _end(self, n: int, upto: int, reason: str, stop: Any) -> tuple[int, str, str, Any]:
        whole = self.text.decode(self.token_ids[:upto])
        found = self._match(whole, len(self.visible[upto]), n)
        return (n, whole[: found[0]], "stop", found[1]) if found else (n, whole, reason, stop)

    def _match(self, text: str, after: int, n: int) -> tuple[int, str] | None:
        """The stop string that ends first beyond ``after``; of several, the longest."""
        if n < self.params.min_tokens:
            return None
        for end in range(after + 1, len(text) + 1):
            here = [s for s in self.params.stop if text[:end].endswith(s)]
            if here:
                longest = max(here, key=len)
                return end - len(longest), longest
        return None

    def held(self, n: int) -> int:
        text = self.visible[n]
        heads = [s[:i] for s in self.params.stop for i in range(len(s))]
        return max((len(h) for h in heads if text.endswith(h)), default=0)


byte_tokens = st.one_of(
    st.sampled_from([*spell("ab é😀th"), 0, EOS]),
    st.sampled_from(range(259, len(BYTES.tables.known))),
)
fallback_tokens = st.one_of(st.integers(0, 8), st.sampled_from([9 + b for b in "ab é😀".encode()]))
stop_strings = st.lists(st.text("ab thé😀�", min_size=1, max_size=5), max_size=3, unique=True).map(
    tuple
)


@pytest.mark.parametrize(
    ("text", "tokens"), [(BYTES, byte_tokens), (FALLBACK, fallback_tokens)], ids=["bytes", "pieces"]
)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_choice_is_what_one_look_at_the_whole_text_gives(
    text: TokenText, tokens: st.SearchStrategy[int], data: st.DataObject
) -> None:
    """STREAM-1, STREAM-3, LOGPROBS-2."""
    token_ids = data.draw(st.lists(tokens, max_size=25))
    params = SamplingParams(
        stop=data.draw(stop_strings),
        stop_token_ids=data.draw(st.sampled_from([(), (5,)])),
        min_tokens=data.draw(st.sampled_from([0, 0, 3, 8])),
        ignore_eos=data.draw(st.booleans()),
        logprobs=data.draw(st.sampled_from([None, 1])),
    )
    most = data.draw(st.integers(1, 30))
    dull = Dull(text, token_ids, params, most)
    choice = ChoiceStream(0, params, text, eos_token_ids=(EOS,), max_tokens=most)
    deltas, whole = run(choice, token_ids)

    assert "".join(said(deltas)) == whole.text == dull.answer
    assert (whole.finish_reason, whole.stop_reason) == (dull.reason, dull.stop)
    assert choice.num_tokens == dull.num_tokens
    assert [d.finish_reason for d in deltas if d and d.finish_reason] == [dull.reason]
    listed = [i for d in deltas if d for i in d.token_ids]
    assert tuple(listed) == whole.token_ids == tuple(token_ids[: len(listed)])
    check_what_is_listed(text, token_ids, whole, dull)
    if params.logprobs is None:
        check_no_more_is_held_than_needed(deltas, dull)
    else:
        check_tokens_join_to_the_text(text, deltas)


def check_what_is_listed(text: TokenText, token_ids: list[int], whole: Choice, dull: Dull) -> None:
    """Exactly the tokens whose text is all in the answer; not the one that ended it."""
    by_token = dull.reason == "stop" and not isinstance(dull.stop, str)
    pushed = token_ids[: dull.num_tokens - by_token]
    detokenizer = Detokenizer(text)
    length = sum(len(detokenizer.push(i)) for i in pushed)
    ends = detokenizer.settled()
    if len(whole.text) > length or dull.num_tokens == len(token_ids) or not by_token:
        detokenizer.flush()
        ends += detokenizer.settled()
    fits = sum(end <= len(whole.text) for end in ends)
    assert len(whole.token_ids) <= fits
    if not isinstance(dull.stop, str):
        assert len(whole.token_ids) == len(pushed)
    assert all(end <= len(whole.text) for end in ends[: len(whole.token_ids)])


def check_no_more_is_held_than_needed(deltas: list[Delta | None], dull: Dull) -> None:
    out = 0
    for n, piece in enumerate(said(deltas[:-1]), 1):
        out += len(piece)
        assert len(dull.visible[n]) - out == dull.held(n)


def check_tokens_join_to_the_text(text: TokenText, deltas: list[Delta | None]) -> None:
    for delta in deltas:
        if delta is None:
            continue
        assert delta.logprobs is not None
        assert tuple(p.token_id for p in delta.logprobs) == delta.token_ids
        if "�" in delta.text:  # bytes that are no text, which the token's own bytes tell
            continue
        named = [p.token_bytes for p in delta.logprobs if not text.is_special(p.token_id)]
        joined = b"".join(named).decode("utf-8", "replace")
        if isinstance(delta.stop_reason, str):
            assert delta.text.startswith(joined)
        else:
            assert delta.text == joined


# ---- by example ---------------------------------------------------------------------------------


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


def test_a_long_stop_string_that_nearly_matches_over_and_over_costs_no_second_look() -> None:
    """Its work is counted in characters, however much of the stop string they match."""

    class Counted(str):
        looks = 0

        def __getitem__(self, key: Any) -> str:
            Counted.looks += 1
            return super().__getitem__(key)

    stop = Counted("a" * 500 + "b")
    matcher = StopMatcher((stop,))
    Counted.looks = 0
    for _ in range(20):
        assert matcher.feed("a" * 499 + "c", armed=True) is None
    assert Counted.looks < 4 * 20 * 500
    assert matcher.feed("a" * 700 + "b", armed=True) is not None
