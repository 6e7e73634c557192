"""The tree as a list: every block is in it once, the largest in full, of these tenants alone."""

from __future__ import annotations

import random
import time

import pytest

from radixkv import dump as dumping
from radixkv.cache import PrefixCache
from radixkv.dump import Dump, DumpNode
from radixkv.tokens import encode
from tests.cache_runs import Clock, fresh, identity, run

ME, YOU = identity("me"), identity("you")


def grown(seed: int, num: int = 60) -> PrefixCache:
    """A cache of two tenants whose prompts branch at random."""
    rng = random.Random(seed)
    cache = PrefixCache(2000, 4)
    texts: list[list[int]] = [[]]
    for _ in range(num):
        old = rng.choice(texts)
        texts.append(old[: rng.randrange(len(old) + 1)] + fresh(rng.randint(1, 40)))
        run(cache, rng.choice([ME, YOU, identity("me", "salt")]), texts[-1])
    return cache


def by_parent(found: Dump) -> dict[int | None, list[DumpNode]]:
    out: dict[int | None, list[DumpNode]] = {}
    for node in found.nodes:
        out.setdefault(node.parent, []).append(node)
    return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("depth", "limit"), [(8, 1000), (2, 1000), (0, 1000), (99, 7), (3, 20)])
def test_whatever_is_left_out_is_in_the_sums(seed: int, depth: int, limit: int) -> None:
    cache = grown(seed)
    found = cache.dump(depth=depth, limit=limit)
    assert found.complete
    children = by_parent(found)
    assert [node.id for node in found.nodes] == [*range(len(found.nodes))]
    roots = children[None]
    assert sum(root.subtree_blocks for root in roots) == cache.cached_blocks
    assert sum(root.subtree_tokens for root in roots) == cache.stats().cached_tokens
    drawn = [node for node in found.nodes if node.kind != "other"]
    assert len(drawn) <= limit
    levels: dict[int | None, int] = {None: -1}
    for node in found.nodes:
        assert node.parent is None or node.parent < node.id
        levels[node.id] = levels[node.parent] + 1
        below = children.get(node.id, [])
        assert sum(child.kind == "other" for child in below) <= 1
        if node.kind == "other":
            assert not below
            continue
        assert levels[node.id] <= depth
        assert node.blocks + sum(c.subtree_blocks for c in below) == node.subtree_blocks
        assert node.tokens + sum(c.subtree_tokens for c in below) == node.subtree_tokens
        assert 1 + sum(c.subtree_nodes for c in below) == node.subtree_nodes
        if limit >= 1000 and levels[node.id] < depth:
            assert all(child.kind == "node" for child in below)
        largest = [child.subtree_blocks for child in below if child.kind == "node"]
        assert largest == sorted(largest, reverse=True)


def test_only_the_tenants_that_are_asked_for_are_in_it() -> None:
    """SECURITY-5: no tokens, sizes or identities of others, and none for those without."""
    cache = grown(1)
    mine = cache.dump(["me"])
    assert {node.tenant for node in mine.nodes} == {"me"}
    assert sum(n.subtree_blocks for n in mine.nodes if n.parent is None) == (
        cache.account("me").blocks
    )
    assert cache.dump([]).nodes == () and cache.dump(["nobody"]).nodes == ()
    assert "nobody" not in cache.accounts
    both = cache.dump(["me", "you", "me"])
    assert {n.tenant for n in both.nodes} == {"me", "you"}
    assert len(both.nodes) == len(cache.dump().nodes)
    digests = {identity("me").digest().hex(), identity("me", "salt").digest().hex()}
    assert {node.identity for node in mine.nodes} == digests
    few = cache.dump(["me"], limit=1)
    assert [n.kind for n in few.nodes if n.parent is None] == ["root", "other"]
    assert few.nodes[-1].tenant == "me" and few.nodes[-1].identity is None


def test_token_ids_are_told_on_request_only() -> None:
    cache = PrefixCache(64, 4)
    text = fresh(10)
    run(cache, ME, text)
    assert all(node.token_ids is None for node in cache.dump().nodes)
    nodes = cache.dump(token_ids=100).nodes
    assert [node.token_ids for node in nodes] == [(), tuple(text[:8]), tuple(text[8:])]
    assert [node.start for node in nodes] == [0, 0, 8]
    assert [node.token_ids for node in cache.dump(token_ids=3).nodes][1] == tuple(text[:3])


def test_who_holds_it_and_since_when_nobody_does() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    stem = fresh(8)
    texts = [[*stem, *fresh(8)] for _ in range(3)]
    for text in texts:
        run(cache, ME, text)
        clock.sleep(10)
    leases = [cache.acquire(ME, encode(texts[i])) for i in (0, 0, 1)]
    leases.append(cache.acquire(ME, encode(stem)))
    root, stem_node, *leaves = cache.dump().nodes
    assert (root.references, stem_node.references) == (4, 4)
    assert sorted(leaf.references for leaf in leaves) == [0, 1, 2]
    assert root.idle_s == stem_node.idle_s == 0.0
    assert [leaf.idle_s for leaf in leaves if not leaf.references] == [pytest.approx(10, abs=0.1)]
    for lease in leases:
        lease.release()
    cache.tick()
    clock.sleep(5)
    assert {node.references for node in cache.dump().nodes} == {0}
    idle = [node.idle_s for node in cache.dump().nodes]
    assert idle[:2] == [pytest.approx(5, abs=0.1)] * 2


def test_what_is_too_much_to_look_at_is_said_to_be_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = grown(2)
    monkeypatch.setattr(dumping, "MAX_VISITED", 10)
    found = cache.dump()
    assert not found.complete and 0 < len(found.nodes) <= 10


def test_a_tree_is_dumped_in_time_that_grows_with_its_nodes_and_no_faster() -> None:
    """Ten times the nodes, up to ten thousand: about ten times as long, where a walk for each node
    would take a hundred times. In processor time, both in one run."""
    cache = PrefixCache(60_000, 4)
    stems = [fresh(8) for _ in range(100)]
    costs = []
    for num_nodes in (1_000, 10_000):
        while cache.stats().nodes < num_nodes:
            run(cache, ME, [*stems[cache.stats().nodes % 100], *fresh(16)], tail=False)
        times = []
        for _ in range(5):
            start = time.process_time()
            found = cache.dump(limit=10_000)
            times.append(time.process_time() - start)
        assert len(found.nodes) >= num_nodes
        costs.append(min(times))
    assert costs[1] < 40 * costs[0]


def test_a_drawing_is_of_the_moment_that_was_surveyed() -> None:
    """Whatever becomes of the tree and the time until it is drawn, on another thread."""
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    stem = fresh(8)
    for _ in range(5):
        run(cache, ME, [*stem, *fresh(13)])
        clock.sleep(10)
    before = cache.dump(token_ids=3)
    survey = dumping.Survey(cache, None)
    clock.sleep(1000)
    for _ in range(40):
        run(cache, YOU, fresh(20))
    run(cache, ME, [*stem[:5], *fresh(30)])
    assert cache.dump(token_ids=3) != before
    assert survey.draw(token_ids=3) == before
