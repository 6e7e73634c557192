"""A choice that is streamed is what one look at its whole text gives (against a dull model)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.engine.detokenize import Detokenizer, TokenText
from radixkv.service.engine.params import Choice, Delta, SamplingParams
from radixkv.service.engine.stopping import ChoiceStream
from tests.stopping_cases import BYTES, EOS, FALLBACK, run, said, spell


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
                self.pushed = self.token_ids[:n]
                return n, self.visible[n][: found[0]], "stop", found[1]
            if n == most:
                return self._end(n, n, "length", None)
        n = len(self.token_ids)
        return self._end(n, n, "length", None)

    def _end(self, n: int, upto: int, reason: str, stop: Any) -> tuple[int, str, str, Any]:
        self.pushed = self.token_ids[:upto]  # without an eos or stop token that ended it
        whole = self.text.decode(self.pushed)
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
    check_what_is_listed(text, whole, dull)
    if params.logprobs is None:
        check_no_more_is_held_than_needed(deltas, dull)
    else:
        check_tokens_join_to_the_text(text, deltas)


def check_what_is_listed(text: TokenText, whole: Choice, dull: Dull) -> None:
    """Exactly the tokens whose text is all in the answer; not the one that ended it."""
    detokenizer = Detokenizer(text)
    for token_id in dull.pushed:
        detokenizer.push(token_id)
    detokenizer.flush()
    assert len(whole.token_ids) == sum(e <= len(whole.text) for e in detokenizer.settled())


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
