"""Sessions against a dull model of them, in orders that nobody would think of.

The engine is a real one, thread and all, on the model made of arithmetic: its answers prove that
every block it read was the right one. The dull model keeps lists of tokens, and knows what must be
held where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import Engine, Session
from radixkv.errors import InvalidRequest
from radixkv.service.engine import engine as engine_module
from radixkv.service.engine.batch import StepBatch
from tests.fake_model import VOCAB, FakeRunner, greedy
from tests.http_server import build_engine
from tests.session_cases import turn_clock

BLOCK, BLOCKS, TTL_S = 4, 96, 60.0
ids = st.integers(3, VOCAB - 1)
# Runs of few tokens, so that branches meet again, and of all lengths beside the block's.
texts = st.tuples(st.integers(3, 5), st.sampled_from([1, 1, 2, 3, 4, 5, 9])).map(
    lambda run: [run[0]] * run[1]
)
lengths = st.sampled_from([1, 2, 3, 4, 5, 7])
which = st.integers(0, 5)


class WideRunner(FakeRunner):
    """The model made of arithmetic, with the vocabulary of the tiny tokenizer."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._vocab_size = vocab_size

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Answer as the narrow one does; further tokens are never likely."""
        narrow = super().forward(batch)
        rest = torch.full((len(narrow), self._vocab_size - VOCAB), -1e9)
        return torch.cat([narrow, rest], dim=1)


@dataclass
class Branch:
    """A session, and what it must be: the tokens at the end of each turn, from the beginning."""

    session: Session
    places: list[list[int]]
    held: int = 0
    """Tokens that it must hold if budgets allow: those with KV when its place was reached."""


class SessionsAgainstModel(RuleBasedStateMachine):
    engine: Engine

    @initialize(pinnable=st.sampled_from([0.0, 0.1, 0.5]), tenants=st.booleans())
    def start(self, pinnable: float, tenants: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                engine_module,
                "runner_of",
                lambda model, config, num_blocks: WideRunner(
                    num_blocks, config.block_size, model.vocab_size
                ),
            )
            self.engine = build_engine(
                kv_memory=BLOCKS * 1024 * BLOCK // 2,
                block_size=BLOCK,
                max_model_len=128,
                pin_budget=pinnable,
                max_batch_tokens=24,
                lookahead_tokens=0,
            )
        self.clock = turn_clock(self.engine)
        self.branches: list[Branch] = []
        self.open(0)
        if tenants:
            self.open(1)

    def teardown(self) -> None:
        for branch in getattr(self, "branches", []):
            branch.session.close()
        if hasattr(self, "engine"):
            assert self.engine.drain(60.0)
            assert self.engine.check() == [] and self.engine.pins.of() == []
            stats = self.engine.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
            assert self.engine._core.counters.violations == 0
            self.engine.close()

    # -- what users do ----------------------------------------------------------------------------

    @rule(tenant=st.integers(0, 1))
    @precondition(lambda self: len(self.branches) < 8)
    def open(self, tenant: int) -> None:
        session = self.engine.session(
            template=False,
            tenant=f"tenant-{tenant}",
            temperature=0,
            ignore_eos=True,
            ttl_s=TTL_S,
        )
        self.branches.append(Branch(session, [[]]))

    @rule(which=which, text=texts, length=lengths)
    @precondition(lambda self: self.branches)
    def send_more(self, which: int, text: list[int], length: int) -> None:
        """The same, so that there is more talk than anything else."""
        self.send(which, text, length)
        self.send(which, text[:1], 1)

    @rule(which=which, text=texts, length=lengths)
    @precondition(lambda self: self.branches)
    def send(self, which: int, text: list[int], length: int) -> None:
        branch = self.pick(which)
        if not self.has_room(branch, text, length):
            return
        held = branch.session.lease.tokens
        turn = branch.session.send(text, max_tokens=length).result()
        self.expect_answer(branch, text, length, turn.token_ids)
        assert turn.cached_tokens >= min(held, turn.usage.prompt_tokens - 1)
        self.reached(branch)

    @rule(some=st.lists(st.tuples(texts, lengths), min_size=2, max_size=5))
    @precondition(lambda self: self.branches)
    def send_at_once(self, some: list[tuple[list[int], int]]) -> None:
        """Branches ask together; where the pool is too small they take each other's blocks."""
        asked = [
            (branch, text, length, branch.session.send(text, max_tokens=length))
            for branch, (text, length) in zip(self.branches, some, strict=False)
            if self.has_room(branch, text, length)
        ]
        for branch, text, length, reply in asked:
            self.expect_answer(branch, text, length, reply.result().token_ids)
            self.reached(branch)

    @rule(which=which, text=texts, read=st.integers(0, 3))
    @precondition(lambda self: self.branches)
    def leave_early(self, which: int, text: list[int], read: int) -> None:
        """Break out of a reply: what was read of it is the turn, if anything was."""
        branch = self.pick(which)
        if not self.has_room(branch, text, 20):
            return
        reply = branch.session.send(text, max_tokens=20)
        for _ in zip(range(read), reply, strict=False):
            pass
        reply.close()
        if not reply.token_ids and not reply.text:
            return  # as if never sent
        prompt = [*branch.places[-1], *text]
        said = list(reply.token_ids)
        assert said == greedy(prompt, len(said))
        now = list(branch.session.tokens)
        assert now[: len(prompt) + len(said)] == [*prompt, *said]
        branch.places.append(now)  # with the head of a token of which only that was read
        branch.held = 0

    @rule(which=which, n=st.integers(1, 3))
    @precondition(lambda self: self.branches and len(self.branches) < 8)
    def fork(self, which: int, n: int) -> None:
        branch, engine = self.pick(which), self.engine
        before = [pin.id for pin in engine.pins.of()], engine.cache.stats()
        forks = branch.session.fork(n)
        assert ([pin.id for pin in engine.pins.of()], engine.cache.stats()) == before
        self.branches += [Branch(fork, list(branch.places), branch.held) for fork in forks]

    @rule(which=which, turn=st.integers(-3, 6))
    @precondition(lambda self: self.branches)
    def rewind(self, which: int, turn: int) -> None:
        branch = self.pick(which)
        number = len(branch.places) - 1
        wanted = turn if turn >= 0 else number + turn
        if not 0 <= wanted <= number:
            with pytest.raises(InvalidRequest, match=f"has {number} turns"):
                branch.session.rewind(turn)
            return
        branch.session.rewind(turn)
        del branch.places[wanted + 1 :]
        branch.held = min(branch.held, len(branch.places[-1]))

    @rule(which=which)
    @precondition(lambda self: self.branches)
    def close(self, which: int) -> None:
        branch = self.branches.pop(which % len(self.branches))
        branch.session.close()
        with pytest.raises(InvalidRequest, match="closed"):
            branch.session.send([3])

    @rule(seed=st.integers(6, VOCAB - 1))
    def flood(self, seed: int) -> None:
        """Somebody else asks for so much that all that is not held is evicted."""
        for i in range(4):
            prompt = [6 + (seed * 7 + i * 13 + j * j) % (VOCAB - 6) for j in range(100)]
            self.engine.generate(prompt, max_tokens=1, temperature=0, tenant="loud", salt=str(i))

    @rule(seconds=st.sampled_from([TTL_S / 2, TTL_S + 1]))
    def wait(self, seconds: float) -> None:
        self.engine._core.call(lambda: self.clock.sleep(seconds)).result()
        if seconds > TTL_S:
            for branch in self.branches:
                lease = branch.session.lease
                assert lease.tokens == 0 and lease.short in ("gone", "budget", None)
                branch.held = 0

    # -- what must be so --------------------------------------------------------------------------

    @invariant()
    def everything_is_sound(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.check() == []
        assert self.engine.failure is None
        budgets = [self.engine.pins.budget(f"tenant-{i}") for i in range(2)]
        assert all(budget.used_blocks <= budget.blocks for budget in budgets)
        for branch in self.branches:
            assert list(branch.session.tokens) == branch.places[-1]
            assert len(branch.session.turns) == len(branch.places) - 1
            lease = branch.session.lease
            assert branch.session.cached_tokens >= lease.tokens
            assert lease.tokens <= lease.wanted_tokens <= len(branch.places[-1])
            if lease.short is None:
                assert lease.tokens >= branch.held

    def pick(self, which: int) -> Branch:
        return self.branches[which % len(self.branches)]

    def has_room(self, branch: Branch, text: Sequence[int], length: int) -> bool:
        return len(branch.places[-1]) + len(text) + length <= 128 - BLOCK

    def reached(self, branch: Branch) -> None:
        """The branch stands at a new place: all of it but the token drawn last has KV."""
        lease = branch.session.lease
        branch.held = len(branch.places[-1]) - 1 if lease.short is None else 0
        if lease.short is None:
            assert lease.tokens == branch.held

    def expect_answer(
        self, branch: Branch, text: list[int], length: int, said: tuple[int, ...]
    ) -> None:
        prompt = [*branch.places[-1], *text]
        assert list(said) == greedy(prompt, length)
        branch.places.append([*prompt, *said])


def _settings(**more: Any) -> settings:
    return settings(
        deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, **more
    )


TestSessions = SessionsAgainstModel.TestCase
TestSessions.settings = _settings(max_examples=20, stateful_step_count=35)
