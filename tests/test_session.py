"""Sessions: what is sent and answered, where forks and rewinds lead, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv import Engine, Session
from radixkv.errors import AdapterNotFound, ContextTooLong, EngineDead, InvalidRequest
from radixkv.kernels.native import unavailable_reason
from tests.adapter_cases import save_adapter
from tests.http_server import build_engine
from tests.session_cases import BLOCK, GREEDY, SYSTEM, flood, session_engine


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with session_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert shared.check() == [] and shared.pins.of() == []
    shared.cache.reset()


def test_the_names_a_user_needs_are_at_the_front_door() -> None:
    assert {"Session", "SessionLease", "Reply", "Turn"} <= set(radixkv.__all__)
    assert {"BeamParams", "BeamResult", "GrammarSpec"} <= set(radixkv.__all__)
    assert all(hasattr(radixkv, name) for name in radixkv.__all__)


def test_a_session_goes_on_from_what_was_said(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        reply = s.send("hello there")
        pieces = list(reply)
        first = s.turns[0]
        assert "".join(pieces) == reply.text == first.text and len(pieces) > 1
        assert first.token_ids == reply.token_ids and len(first.token_ids) == 12
        assert (first.number, first.sent, first.finish_reason) == (1, "hello there", "length")
        second = s.send("and you").result()
        assert [turn.number for turn in s.turns] == [1, 2] and s.turns[1] is second
        roles = [message["role"] for message in s.messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert s.messages[2]["content"] == first.text
        assert repr(s) == f"<Session: 2 turns, {len(s.tokens)} tokens>"


def test_the_first_prompt_is_that_of_a_chat_and_shares_its_blocks(engine: Engine) -> None:
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    asked = engine.chat(chat, **GREEDY)
    with engine.session(system=SYSTEM, **GREEDY) as s:
        turn = s.send("hello").result()
    assert turn.token_ids == asked.token_ids
    assert turn.cached_tokens == asked.usage.prompt_tokens - 1 and turn.computed_tokens == 1


def test_everything_but_what_is_new_is_a_hit_to_the_token(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        for text in ("hello", "a", "the user of the system", "so"):
            before, held = s.tokens, s.lease
            turn = s.send(text).result()
            if s.turns[:-1]:
                assert held.tokens == held.wanted_tokens == len(before) - 1
                assert turn.cached_tokens == held.tokens
            assert s.tokens[: len(before)] == before
            assert s.cached_tokens == len(s.tokens) - 1, "the last one drawn was not computed"


def test_an_answer_that_ended_by_itself_is_held_to_its_last_token(engine: Engine) -> None:
    with engine.session(system=SYSTEM, temperature=0, max_tokens=12) as s:
        eos = engine.tokenizer.eos_token_id
        turn = s.send("hello", logit_bias={eos: 100.0}, min_tokens=5).result()
        assert turn.finish_reason == "stop" and len(turn.token_ids) == 5
        assert s.cached_tokens == s.lease.tokens == len(s.tokens)
        assert s.send("a").result().cached_tokens == len(s.turns[0].token_ids) + (
            turn.usage.prompt_tokens
        )


def test_a_fork_copies_nothing_and_its_first_send_one_partial_block(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello there").result()
        pins, stats = [pin.id for pin in engine.pins.of()], engine.cache.stats()
        forks = s.fork(8)
        forks += [forks[0].branch(), forks[0].branch()]
        assert [pin.id for pin in engine.pins.of()] == pins
        assert engine.cache.stats() == stats, "not a block"
        held = s.lease
        assert all(fork.lease.tokens == held.tokens for fork in forks)
        turns = [fork.send(f"{i} is it").result() for i, fork in enumerate(forks)]
        assert engine.cache.stats().cow_copies - stats.cow_copies <= len(forks)
        assert all(turn.cached_tokens >= held.tokens for turn in turns)
        assert turns[0].cached_tokens == held.tokens
        assert len({turn.token_ids for turn in turns}) > 1
        assert len(s.turns) == 1 and all(len(fork.turns) == 2 for fork in forks)
        for fork in forks:
            fork.close()


def test_forks_at_every_offset_of_a_block_equal_runs_of_their_own(engine: Engine) -> None:
    """COW-3: and the parent is what it was."""
    ask = GREEDY | {"max_tokens": 3}
    for offset in range(BLOCK):
        stem = [3 + (offset + i * i) % 290 for i in range(BLOCK + offset)]
        with engine.session(template=False, **ask) as s:
            s.send(stem, max_tokens=1).result()
            tokens, copies = s.tokens, engine.cache.stats().cow_copies
            forks = s.fork(4)
            replies = [fork.send([50 + i]) for i, fork in enumerate(forks)]
            said = [reply.result().token_ids for reply in replies]
            assert engine.cache.stats().cow_copies - copies <= 4
            alone = [
                engine.generate([*tokens, 50 + i], salt=f"{offset}", **ask).token_ids
                for i in range(4)
            ]
            assert said == alone and s.tokens == tokens
            assert s.lease.tokens == len(stem)
            for fork in forks:
                fork.close()


def test_a_place_gives_the_same_whatever_was_said_from_it_meanwhile(engine: Engine) -> None:
    """LIBRARY-1: a handle, two different ways on, then the first again."""
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        tokens, turns = s.tokens, s.turns
        with s.branch() as one, s.branch() as two, s.branch() as three:
            first = one.send("the one").result()
            second = two.send("the other").result()
            again = three.send("the one").result()
        assert first.token_ids == again.token_ids and first.text == again.text
        assert second.token_ids != first.token_ids
        assert s.tokens == tokens and s.turns == turns


def test_ids_sent_behind_a_place_do_what_all_ids_at_once_do(engine: Engine) -> None:
    """LIBRARY-2: positions go on where the handle ends."""
    stem, rest = list(range(3, 80)), [200, 7, 12, 9]
    ask = GREEDY | {"logprobs": 3}
    with engine.session(template=False, **ask) as s:
        s.send(stem, max_tokens=1).result()
        s.rewind(1)
        begun = list(s.tokens)
        turn = s.send(rest).result()
    engine.cache.reset()
    whole = engine.generate([*begun, *rest], **ask)
    assert turn.token_ids == whole.token_ids and turn.cached_tokens == len(stem)
    assert turn.logprobs is not None and whole.choices[0].logprobs is not None
    for mine, its in zip(turn.logprobs, whole.choices[0].logprobs, strict=True):
        assert mine.token_id == its.token_id
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def test_suffixes_of_any_length_on_one_place_at_once_equal_single_runs(engine: Engine) -> None:
    """LIBRARY-3"""
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        texts = ["a", "the user and the assistant of the system " * 3, "is it so"]
        forks = s.fork(3)
        replies = [fork.send(text) for fork, text in zip(forks, texts, strict=True)]
        together = [reply.result().token_ids for reply in replies]
        for fork in forks:
            fork.close()
        engine.cache.lookup([0])
        alone = []
        for text in texts:
            with s.branch() as fork:
                ids = [*fork.tokens, *_rest(engine, fork, text)]
            alone.append(engine.generate(ids, salt=f"alone {text}", **GREEDY).token_ids)
    assert together == alone


def _rest(engine: Engine, session: radixkv.Session, text: str) -> list[int]:
    """What a send of ``text`` adds to the tokens of a session."""
    said = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return engine.tokenize(said, add_special_tokens=False)


def test_many_single_prompts_on_one_beginning_cost_their_own_tokens(engine: Engine) -> None:
    """LIBRARY-4: one-shot work has its share of the hits, not only chats that grow."""
    stem = [3 + i % 290 for i in range(400)]
    with engine.session(template=False, **GREEDY) as s:
        s.send(stem, max_tokens=1).result()
        with s.rewind(1) as base:
            for i in range(20):
                with base.branch() as one:
                    turn = one.send([i + 5] * 35, max_tokens=1).result()
                    assert turn.computed_tokens <= 36


def test_rewinding_goes_back_and_what_was_there_is_still_a_hit(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        places = []
        for text in ("hello", "a", "the other"):
            s.send(text).result()
            places.append((s.tokens, s.turns))
        assert s.rewind(3) is s and s.tokens == places[2][0]
        for back in (1, -1):
            s.rewind(2).rewind(back)
            assert (s.tokens, s.turns) == places[0] and s.lease.tokens == len(s.tokens)
            turn = s.send("a").result()
            assert (s.tokens, turn.token_ids) == (places[1][0], places[1][1][1].token_ids)
            assert turn.computed_tokens == 1
        s.rewind(0)
        assert s.turns == () and s.lease.tokens == len(s.tokens) > 0
        assert s.messages == ({"role": "system", "content": SYSTEM},)
        assert engine.tokenizer.decode(s.tokens) == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"


def test_a_copy_is_a_fork_whose_end_leaves_the_original_what_it_holds(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        held, tokens = s.lease, s.tokens
        for make in (copy.copy, copy.deepcopy):
            twin = make(s)
            assert twin is not s and twin.tokens == tokens and twin.lease.tokens == held.tokens
            twin.send("more").result()
            assert len(twin.turns) == 2 and len(s.turns) == 1
            del twin
            gc.collect()
            flood(engine)
            assert s.lease.tokens == held.tokens > 0, "the copy's end is not the original's"
        assert s.send("and").result().cached_tokens >= held.tokens
        with pytest.raises(TypeError, match=r"cannot be pickled: fork\(\)"):
            pickle.dumps(s)


@pytest.mark.parametrize(
    ("param", "wrong"),
    [
        ("turn", lambda s: s.rewind(None)),
        ("turn", lambda s: s.rewind(1.0)),
        ("n", lambda s: s.fork("2")),
        ("n", lambda s: s.fork(True)),
        ("temperature", lambda s: s.send("a", temperature="a")),
        ("max_tokens", lambda s: s.send("a", max_tokens="5")),
        ("seed", lambda s: s.send("a", seed=1.5)),
        ("stop", lambda s: s.send("a", stop=5)),
        ("stop", lambda s: s.send("a", stop=[5])),
        ("logit_bias", lambda s: s.send("a", logit_bias=[1])),
        ("beams", lambda s: s.send("a", beams=3)),
        ("messages", lambda s: s.send(5)),
        (None, lambda s: s.send("a", regex=5)),
        (None, lambda s: s.send("a", choice=5)),
    ],
)
def test_a_wrong_type_is_refused_in_words_and_changes_nothing(
    engine: Engine, param: str | None, wrong: Callable[[Session], object]
) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        with pytest.raises(InvalidRequest, match="wanted|no list") as refused:
            wrong(s)
        assert refused.value.param == param
        assert len(s.turns) == 1 and s.send("on").result().number == 2


@pytest.mark.parametrize(
    "given", [{"ttl_s": "a"}, {"budget_blocks": "a"}, {"priority": "a"}, {"salt": 5}]
)
def test_a_session_of_wrong_types_is_not_begun(engine: Engine, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(given))} is .*wanted"):
        engine.session(**given)


def test_ids_that_are_none_are_refused(engine: Engine) -> None:
    with engine.session(template=False, **GREEDY) as s:
        for wrong in (None, 5, [1.5], b"ab", {5: 5}):
            with pytest.raises(InvalidRequest, match="wanted text or token ids"):
                s.send(wrong)


@pytest.mark.parametrize("turn", [1, -2])
def test_before_the_first_turn_there_is_nowhere_to_go_back_to(engine: Engine, turn: int) -> None:
    with engine.session(**GREEDY) as s:
        with pytest.raises(InvalidRequest, match=rf"rewind\({turn}\): .* 0 turns; wanted 0$"):
            s.rewind(turn)
        assert s.rewind(0) is s


@pytest.mark.parametrize("turn", [2, -2, 99])
def test_a_turn_that_is_not_there_cannot_be_gone_back_to(engine: Engine, turn: int) -> None:
    with engine.session(**GREEDY) as s:
        s.send("hello").result()
        with pytest.raises(InvalidRequest, match=rf"rewind\({turn}\): the session has 1 turns"):
            s.rewind(turn)
        assert len(s.turns) == 1


def test_a_seed_gives_each_fork_its_own_and_all_of_it_again(engine: Engine) -> None:
    """COW-2: forks that say the same would be of no use."""

    def grow() -> list[tuple[int, ...]]:
        with engine.session(seed=7, temperature=1.0, max_tokens=8, ignore_eos=True) as s:
            s.send("hello").result()
            forks = s.fork(3)
            found = [s.turns[0].token_ids]
            found += [fork.send("and").result().token_ids for fork in forks]
            found.append(s.send("and", seed=7).result().token_ids)
            for fork in forks:
                fork.close()
            return found

    first = grow()
    assert len(set(first)) == len(first) and grow() == first


def test_forks_are_asked_at_once_from_many_threads(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        held = s.lease.tokens
        forks = s.fork(6)
        found: dict[int, list[Any]] = {}

        def talk(i: int) -> None:
            found[i] = [forks[i].send(f"{i} {j}").result() for j in range(3)]

        threads = [threading.Thread(target=talk, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(turns[0].cached_tokens >= held for turns in found.values())
        for i, fork in enumerate(forks):
            with s.branch() as again:
                alone = [again.send(f"{i} {j}").result().token_ids for j in range(3)]
            assert [turn.token_ids for turn in found[i]] == alone
            assert fork.tokens[: len(s.tokens)] == s.tokens
            fork.close()


def test_a_stop_string_is_no_part_of_the_history(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        free = s.send("hello").result()
        s.rewind(0)
        stop = free.text[4:6]
        turn = s.send("hello", stop=stop).result()
        assert turn.finish_reason == "stop" and turn.stop_reason == stop
        assert turn.text == free.text[: free.text.index(stop)]
        s.send("a").result()
        said = engine.tokenizer.decode(s.tokens)
        assert f"assistant\n{turn.text}<|im_end|>\n<|im_start|>user\na" in said


def test_tools_and_earlier_messages_are_part_of_the_prompt(engine: Engine) -> None:
    before = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    with engine.session(system="s", messages=before, **GREEDY) as s:
        s.send({"role": "user", "content": "so"}).result()
        chat = [{"role": "system", "content": "s"}, *before, {"role": "user", "content": "so"}]
        ids = engine.render(chat)
        assert list(s.tokens[: len(ids)]) == ids
        s.send([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]).result()
        assert "tool\n1<|im_end|>\n<|im_start|>tool\n2" in engine.tokenizer.decode(s.tokens)


def test_calls_of_tools_are_read_and_their_results_cost_only_themselves() -> None:
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    ]
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    template = Path(__file__).parent.parent / "examples" / "templates" / "chatml_tools.jinja"
    ask = GREEDY | {"max_tokens": 100, "ignore_eos": False}
    with (
        session_engine(chat_template=str(template)) as engine,
        engine.session(system=SYSTEM, tools=tools, **ask) as s,
    ):
        turn = s.send("what is at sea", choice=[call]).result()
        assert turn.text == call and turn.content == ""
        assert [(c.name, c.arguments) for c in turn.calls] == [("look", '{"at": "sea"}')]
        held = s.lease.tokens
        assert held >= len(s.tokens) - 1
        answer = s.send({"role": "tool", "content": "a ship"}, regex="a [a-z]{1,4}").result()
        assert answer.cached_tokens >= held and answer.calls == ()
        assert answer.content == answer.text and answer.text.startswith("a ")
        said = engine.detokenize(s.tokens)
        assert f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\na ship" in said


def test_what_an_answer_must_look_like_holds_for_a_send_or_for_the_session(
    engine: Engine,
) -> None:
    with engine.session(regex="[ab]{3}", temperature=0, max_tokens=20) as s:
        assert set(s.send("hello").result().text) <= set("ab")
        assert s.send("hello", choice=["xyz"]).result().text == "xyz"
        assert set(s.send("hello").result().text) <= set("ab")


def test_tools_that_the_template_does_not_show_are_refused_at_once(engine: Engine) -> None:
    remedy = r"no place for tools.*--chat-template FILE.*Engine\(chat_template=FILE\)"
    with pytest.raises(InvalidRequest, match=remedy):
        engine.session(tools=[{"type": "function", "function": {"name": "look"}}])


# ---- whose it is --------------------------------------------------------------------------------


def test_another_tenant_or_salt_finds_nothing_of_it(engine: Engine) -> None:
    """SECURITY: a session is its tenant's, and its pins are too."""
    whose: list[dict[str, Any]] = [{}, {"tenant": "b"}, {"tenant": "b", "salt": "x"}]
    sessions = [engine.session(system=SYSTEM, **GREEDY, **who) for who in whose]
    turns = [s.send("hello").result() for s in sessions]
    assert [turn.cached_tokens for turn in turns] == [0, 0, 0]
    assert len({turn.token_ids for turn in turns}) == 1
    assert [pin.owner for pin in engine.pins.of()] == ["local", "b", "b"]
    again = [s.send("a").result() for s in sessions]
    assert all(turn.cached_tokens == again[0].cached_tokens > 0 for turn in again)
    for s in sessions:
        s.close()


def test_a_session_speaks_under_its_adapter(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    with session_engine() as engine:
        engine.load_adapter("style", tmp_path)
        with (
            engine.session(system=SYSTEM, adapter="style", **GREEDY) as styled,
            engine.session(system=SYSTEM, **GREEDY) as plain,
        ):
            ours, others = styled.send("hello").result(), plain.send("hello").result()
            assert ours.cached_tokens == others.cached_tokens == 0
            assert ours.token_ids != others.token_ids
            ids = engine.render([*styled.messages[:2]])
            asked = engine.generate(ids, adapter="style", salt="x", **GREEDY)
            assert ours.token_ids == asked.token_ids
            assert styled.send("a").result().cached_tokens == len(ids) + 11
            place, turns = styled.tokens, styled.turns
            engine.unload_adapter("style")
            with pytest.raises(AdapterNotFound, match="style"):
                styled.send("b")
            assert (styled.tokens, styled.turns) == (place, turns)
            engine.load_adapter("style", tmp_path)
            assert styled.send("b").result().cached_tokens >= len(place) - 1


@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiled decoder")
def test_a_deterministic_engine_answers_a_fork_as_it_does_a_cold_prompt() -> None:
    """DETERM-2: bits of what is drawn do not depend on what was held."""
    drawn: dict[str, Any] = GREEDY | {"temperature": 0.9, "seed": 3, "logprobs": 2}
    with session_engine(deterministic=True) as engine, engine.session(system=SYSTEM, **drawn) as s:
        s.send("hello").result()
        with s.branch() as fork:
            warm = fork.send("and", seed=9).result()
            prompt = fork.tokens[: warm.usage.prompt_tokens]
        cold = engine.generate(prompt, salt="cold", **(drawn | {"seed": 9}))
        assert cold.usage.cached_tokens == 0 < warm.cached_tokens
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.choices[0].logprobs)


def test_new_weights_answer_from_all_that_was_said(tmp_path: Path) -> None:
    """ADMIN-2: the history stays, the KV of the old weights is not used."""
    with session_engine() as engine, engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        name = "model.layers.0.mlp.down_proj.weight"
        engine.update_weights({name: 2 * engine._model.model.state_dict()[name]})
        assert s.cached_tokens == 0
        turn = s.send("a").result()
        assert turn.cached_tokens == 0
        prompt = s.tokens[: turn.usage.prompt_tokens]
        assert engine.generate(prompt, salt="x", **GREEDY).token_ids == turn.token_ids
        assert s.lease.tokens == s.cached_tokens == len(s.tokens) - 1


@pytest.mark.parametrize("setting", ["prefix_cache", "force_miss"])
def test_without_a_cache_sessions_compute_all_and_say_the_same(setting: str) -> None:
    said = []
    for settings in ({}, {setting: setting == "force_miss"}):
        with session_engine(**settings) as engine, engine.session(system="s", **GREEDY) as s:
            turns = [s.send(text).result() for text in ("hello", "a")]
            said.append([turn.token_ids for turn in turns])
            cached = turns[1].cached_tokens
            assert (cached == 0) == bool(settings)
    assert said[0] == said[1]


# ---- what is refused ----------------------------------------------------------------------------


def test_a_chat_that_is_too_long_says_by_how_much_and_stays(engine: Engine) -> None:
    with engine.session(template=False, **GREEDY) as s:
        s.send([5] * 1000).result()
        held = len(s.tokens)
        assert held == 1012
        wanted = "has 1012 tokens, this adds 13, and with 1 for an answer that is 2 too many"
        with pytest.raises(ContextTooLong, match=wanted) as e:
            s.send([6] * 13)
        assert (e.value.prompt_tokens, e.value.max_tokens, e.value.limit) == (1025, None, 1024)
        with pytest.raises(
            ContextTooLong, match="adds 5, and with 12 for an answer that is 5 too many"
        ):
            s.send([6] * 5)
        assert len(s.tokens) == held and len(s.turns) == 1
        s.send([6] * 2, max_tokens=10).result()
        s.rewind(0).send([6] * 13).result()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "one answer"),
        ({"n": 1, "best_of": 2}, "one answer"),
        ({"tenant": "b"}, "no sampling parameter"),
        ({"temperatur": 1}, "no sampling parameter"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_what_a_send_cannot_do_is_refused_and_nothing_is_sent(
    engine: Engine, fields: dict[str, Any], message: str
) -> None:
    with engine.session(**GREEDY) as s:
        with pytest.raises(InvalidRequest, match=message):
            s.send("hello", **fields)
        assert s.turns == () and s.send("hello").result().number == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl_s": 0},
        {"budget_blocks": -1},
        {"n": 2},
        {"nonsense": 1},
        {"template": False, "system": "s"},
        {"template": False, "tools": [{}]},
        {"messages": [{"content": "no role"}]},
    ],
)
def test_what_a_session_cannot_be_is_refused(engine: Engine, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        engine.session(**fields)


def test_a_closed_session_says_that_it_is_closed(engine: Engine) -> None:
    s = engine.session(**GREEDY)
    s.send("hello").result()
    fork = s.branch()
    s.close()
    s.close()
    assert s.closed and repr(s).startswith("<Session: closed, 1 turns")
    for do in (lambda: s.send("a"), lambda: s.fork(2), lambda: s.rewind(0)):
        with pytest.raises(InvalidRequest, match="this session is closed"):
            do()
    assert len(s.turns) == 1, "what was said can still be read"
    assert fork.send("a").result().cached_tokens == len(s.tokens) - 1
    fork.close()
    with pytest.raises(InvalidRequest, match=r"fork\(0\)"), engine.session() as other:
        other.fork(0)


def test_an_engine_that_has_ended_leaves_sessions_that_can_be_read_and_closed() -> None:
    with build_engine(max_model_len=1024) as engine:
        s = engine.session(**GREEDY)
        s.send("hello").result()
        fork, tokens = s.branch(), s.tokens
        open_reply = fork.send("a", max_tokens=900)
    with pytest.raises(EngineDead):
        open_reply.result()
    with pytest.raises(EngineDead):
        s.send("a")
    with pytest.raises(EngineDead):
        _ = s.cached_tokens
    s.rewind(0).rewind(0)
    assert fork.tokens == tokens and len(fork.turns) == 1
    s.close()
    fork.close()


def test_a_failing_engine_ends_a_reply_with_its_reason(monkeypatch: Any) -> None:
    with session_engine() as engine, engine.session(**GREEDY) as s:
        s.send("hello").result()
        before = s.tokens

        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.runner, "forward", broken)
        reply = s.send("a")
        for _ in range(2):
            with pytest.raises(EngineDead, match="has failed"):
                reply.result()
        assert s.tokens == before and len(s.turns) == 1


def test_what_is_forgotten_is_let_go(engine: Engine) -> None:
    """A session that Python has forgotten holds nothing; its forks do."""
    s = engine.session(**GREEDY)
    s.send("hello").result()
    fork = s.branch()
    del s
    assert len(engine.pins.of()) == 1
    flood(engine)
    assert fork.cached_tokens == len(fork.tokens) - 1
    del fork
    assert engine.pins.of() == []
