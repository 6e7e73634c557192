"""What sessions hold: never evicted while held, within budgets, until their time runs out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixkv import Engine
from tests.session_cases import BLOCK, GREEDY, SYSTEM, flood, session_engine, turn_clock


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with session_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert shared.check() == [] and shared.pins.of() == []
    shared.cache.reset()


def test_a_held_branch_survives_whatever_others_ask_and_goes_when_it_is_closed(
    engine: Engine,
) -> None:
    """EVICT-3, LEAK-3: the partial block at its end too."""
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch.send(f"{i} is the way").result()
        flood(engine)
        for branch in branches:
            held = branch.lease
            assert held.short is None and held.tokens == len(branch.tokens) - 1
            assert held.blocks == -(-held.tokens // BLOCK)
            assert branch.cached_tokens == held.tokens
        assert branches[0].send("a").result().cached_tokens == len(branches[2].tokens) - 1
        rest = branches[1].tokens
        for branch in branches:
            branch.close()
        flood(engine, 1)
        assert s.cached_tokens >= s.lease.tokens == len(s.tokens) - 1
        assert engine.cache.lookup(rest) <= BLOCK * s.lease.blocks, "and theirs is gone"
        assert len(engine.pins.of()) == 1


def test_what_goes_beyond_the_tenants_budget_is_not_held_and_that_is_said(engine: Engine) -> None:
    """EVICT-3: 64 blocks may be pinned, forks and turns count theirs once."""
    with engine.session(template=False, **GREEDY) as s, s.branch() as other:
        s.send([5] * 40 * BLOCK).result()
        assert s.lease.short is None and s.lease.blocks == 41
        other.send([6] * 30 * BLOCK).result()
        lease = other.lease
        assert (lease.short, lease.blocks) == ("budget", 23)
        assert lease.tokens == 23 * BLOCK and lease.wanted_tokens == 30 * BLOCK + 11
        assert engine.pins.budget("local").used_blocks == 64
        flood(engine)
        assert other.cached_tokens == 23 * BLOCK
        assert other.send([7]).result().cached_tokens == 23 * BLOCK, "works on, computes the rest"
        s.rewind(0)
        assert other.send([8]).result().number == 3
        assert other.lease.short is None and other.lease.tokens == len(other.tokens) - 1


def test_a_longer_lease_takes_the_room_of_the_one_that_it_replaces() -> None:
    with session_engine(pin_budget=0.1) as engine, engine.session(**GREEDY) as s:
        budget = engine.pins.budget("local").blocks
        assert budget == 12
        s.send("hello " * 60).result()
        first = s.lease
        s.send("a").result()
        assert first.short is None and s.lease.short is None
        s.rewind(0)
        s.send("you " * 60).result()
        assert s.lease.short is None, "on another path, too"


def test_a_budget_of_its_own_bounds_what_a_session_holds(engine: Engine) -> None:
    with engine.session(system=SYSTEM, budget_blocks=2, **GREEDY) as s, s.branch() as fork:
        s.send("hello there").result()
        assert (s.lease.blocks, s.lease.tokens, s.lease.short) == (2, 2 * BLOCK, "budget")
        flood(engine)
        assert s.send("a").result().cached_tokens == 2 * BLOCK
        fork.send("a").result()
        assert fork.lease.blocks == 2
    with engine.session(budget_blocks=0, **GREEDY) as s:
        s.send("hello").result()
        assert (s.lease.tokens, s.lease.short) == (0, "budget") and engine.pins.of() == []


def test_an_engine_without_room_for_pins_has_sessions_that_hold_nothing() -> None:
    with session_engine(pin_budget=0.0) as engine, engine.session(**GREEDY) as s:
        s.send("hello").result()
        assert (s.lease.tokens, s.lease.short) == (0, "budget")
        assert s.send("a").result().cached_tokens > 0, "the cache has it all the same"


def test_a_lease_runs_out_and_the_session_computes_again() -> None:
    with session_engine() as engine:
        clock = turn_clock(engine)
        with (
            engine.session(system=SYSTEM, ttl_s=60, **GREEDY) as s,
            engine.session(system=SYSTEM, ttl_s=60, salt="same", **GREEDY) as twin,
        ):
            for session in (s, twin):
                session.send("hello").result()
            fork = s.branch()
            clock.sleep(59)
            assert s.lease.expires_in_s == 1.0
            s.send("a").result()  # uses what its fork holds, too
            clock.sleep(59)
            assert fork.lease.short is None and fork.lease.expires_in_s == 1.0
            assert (twin.lease.tokens, twin.lease.short) == (0, "gone")
            clock.sleep(2)
            assert (s.lease.tokens, s.lease.short) == (0, "gone")
            flood(engine)
            assert s.cached_tokens == fork.cached_tokens == twin.cached_tokens == 0
            late, again = fork.send("a").result(), twin.send("a").result()
            assert late.cached_tokens == 0 and late.token_ids == s.turns[1].token_ids
            assert again.token_ids == late.token_ids
            assert fork.lease.tokens == len(fork.tokens) - 1 and fork.lease.expires_in_s == 60
            fork.close()
        with engine.session(ttl_s=None, **GREEDY) as s:
            s.send("hello").result()
            clock.sleep(1e9)
            flood(engine)
            assert s.lease.expires_in_s is None and s.lease.tokens == len(s.tokens) - 1


def test_what_forks_begin_from_is_held_while_somebody_stands_there(engine: Engine) -> None:
    """A rubric and many answers: the session with the rubric has said nothing itself."""
    with engine.session(system=SYSTEM, **GREEDY) as s:
        assert s.lease.wanted_tokens == s.lease.tokens == 0, "nothing was computed yet"
        for i in range(3):
            with s.branch() as one:
                turn = one.send(f"{i} is what").result()
            assert (turn.cached_tokens >= len(s.tokens)) == (i > 0)
            flood(engine, i)
            assert s.lease.short is None and s.lease.tokens == s.cached_tokens == len(s.tokens)
        assert len(engine.pins.of()) == 1


def test_a_place_that_lost_its_lease_has_it_again_when_a_fork_has_computed_it() -> None:
    with session_engine() as engine:
        clock = turn_clock(engine)
        with engine.session(system=SYSTEM, ttl_s=60, **GREEDY) as s:
            s.send("hello").result()
            clock.sleep(61)
            assert s.lease.short == "gone"
            flood(engine)
            with s.branch() as one:
                assert one.send("a").result().cached_tokens == 0
            assert s.lease.short is None and s.lease.tokens == len(s.tokens) - 1
            flood(engine)
            held = s.lease.tokens
            assert s.send("b").result().cached_tokens >= held > 0


def test_whoever_unpins_or_empties_the_cache_takes_the_lease_not_the_session(
    engine: Engine,
) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s, s.branch() as cold:
        s.send("hello").result()
        for pin in engine.pins.of("local"):
            assert pin.name is not None and pin.name.startswith("session-")
            engine.pins.unpin("local", name=pin.name)
        assert s.lease.short == cold.lease.short == "gone"
        again = s.send("a").result()
        engine.cache.reset()
        assert s.lease.short == "gone" and s.cached_tokens == 0
        cold.send("hello").result()
        assert cold.send("a").result().token_ids == again.token_ids


def test_pins_of_a_user_and_of_sessions_leave_each_other_alone(engine: Engine) -> None:
    with engine.session(system=SYSTEM, **GREEDY) as s:
        s.send("hello").result()
        kept = engine.pin(s.tokens, name="mine")
        engine.pin(s.tokens)  # nameless: it takes the place of shorter nameless ones
        assert kept.granted_tokens == len(s.tokens)
        s.send("a").result()
        assert len(engine.pins.of()) == 3 and s.lease.short is None
        engine.pins.unpin("local", name="mine")
        engine.pins.unpin("local", name=None, pin_id=engine.pins.of()[0].id)
        assert s.lease.tokens == len(s.tokens) - 1


def test_a_template_that_leaves_out_thoughts_costs_the_answer_and_no_more() -> None:
    """TEMPLATE-1: the chat is rendered again; what comes before the thoughts is still a hit."""
    with session_engine() as engine:
        with engine.session(system=SYSTEM, **GREEDY) as s:
            said = s.send("hello").result().text
        mark = said[len(said) // 2]  # what ends the thoughts of this model
        tokenizer = engine.tokenizer
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "message['content']",
            "(message['content'].split(mark)[-1] if message['role'] == 'assistant' else "
            "message['content'])",
        )
        mark_it: dict[str, Any] = {"template_kwargs": {"mark": mark}}
        with engine.session(system=SYSTEM, **mark_it, **GREEDY) as s, s.branch() as fresh:
            first, second = s.send("hello").result(), s.send("a").result()
            assert first.text == said == s.messages[2]["content"]
            seen = engine.detokenize(s.tokens[: second.usage.prompt_tokens])
            assert f"assistant\n{said.split(mark)[-1]}<|im_end|>\n<|im_start|>user\na<" in seen
            assert first.usage.prompt_tokens - 2 <= second.cached_tokens
            assert second.cached_tokens < first.usage.prompt_tokens + len(said)
            again = engine.generate(s.tokens[: second.usage.prompt_tokens], salt="cold", **GREEDY)
            assert again.token_ids == second.token_ids
            third = s.send("b").result()
            assert third.cached_tokens >= second.usage.prompt_tokens - 2
            s.rewind(1)
            assert s.lease.tokens == s.cached_tokens >= first.usage.prompt_tokens - 2
            assert fresh.send("hello").result().token_ids == first.token_ids
