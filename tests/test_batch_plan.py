"""The order of a batch: what it adds up to, what it shares, and that memory does not matter."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.service.batch.plan import Plan, Prompt
from radixkv.tokens import common_prefix, encode
from tests.batch_cases import tree_tokens


def prompt(
    ids: list[int], line: int, answer: int = 1, group: bytes = b"", reads: bool = True
) -> Prompt:
    return Prompt(group, encode(ids), line, line * 10, 0, answer, 1, reads)


def planned(prompts: list[Prompt], memory_bytes: int = 2**20) -> Plan:
    plan = Plan(memory_bytes=memory_bytes)
    for each in prompts:
        plan.add(each)
    return plan


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=40)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.lists(st.integers(1, 9), min_size=40, max_size=40))
def test_the_order_costs_the_sum_of_the_edges_and_a_token_for_each_repeat(
    prompts: list[list[int]], answers: list[int]
) -> None:
    with planned([prompt(p, i, answers[i]) for i, p in enumerate(prompts)]) as plan:
        unique, repeats = tree_tokens(prompts)
        totals, steps = plan.totals(), list(plan)
    assert (totals.unique_tokens, totals.optimum_tokens) == (unique, unique + repeats)
    assert totals.prompt_tokens == sum(map(len, prompts))
    assert sorted(step.prompt.line for step in steps) == list(range(len(prompts)))
    for i, step in enumerate(steps):
        best = max(
            (common_prefix(s.prompt.tokens, step.prompt.tokens) for s in steps[:i]), default=0
        )
        assert step.shared_tokens == best
        # Depth first: once a prefix was left, nobody comes back to it.
        if i:
            with_neighbour = common_prefix(steps[i - 1].prompt.tokens, step.prompt.tokens)
            assert with_neighbour == best


@settings(max_examples=50, deadline=None)
@given(PROMPTS)
def test_runs_on_disk_give_the_order_that_memory_gives(prompts: list[list[int]]) -> None:
    """BATCH-2: bounded memory."""
    entries = [prompt(p, i, i % 7) for i, p in enumerate(prompts)]
    with planned(entries) as whole, planned(entries, memory_bytes=1000) as pieces:
        assert (len(prompts) < 8) or pieces.num_runs > 1
        assert list(pieces) == list(whole)
        assert pieces.totals() == whole.totals()


def test_a_closed_plan_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with Plan(memory_bytes=1, directory=tmp_path) as plan:
        plan.add(prompt([1, 2], 1))
        assert list(tmp_path.rglob("*.run"))
    assert list(tmp_path.iterdir()) == []


def test_sibling_leaves_that_say_most_go_first_and_subtrees_keep_their_order() -> None:
    a = [prompt([1, 1, n], n, answer=n) for n in (3, 4, 5)]
    b = [prompt([1, 2, n], 10 + n, answer=100 + n) for n in (3, 4)]
    with planned([*b, *a]) as plan:
        assert [step.prompt.line for step in plan] == [5, 4, 3, 14, 13]
        assert [step.shared_tokens for step in plan] == [0, 2, 2, 1, 2]


def test_what_others_begin_with_goes_before_them_however_little_it_says() -> None:
    entries = [prompt([1, 2], 1, answer=1), prompt([1, 2, 3], 2, answer=9)]
    with planned(entries) as plan:
        assert [step.prompt.line for step in plan] == [1, 2]
        assert plan.totals().optimum_tokens == 3


def test_other_salts_share_nothing_and_scores_are_computed_whole() -> None:
    entries = [
        prompt([1, 2, 3], 1),
        prompt([1, 2, 3], 2, group=b"salt"),
        prompt([1, 2, 4], 3, reads=False),
    ]
    with planned(entries) as plan:
        costs = {step.prompt.line: step.cost for step in plan}
    assert costs == {2: 3, 3: 3, 1: 1}
