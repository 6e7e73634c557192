"""The tree: splits, joins, tails, holds and the order in which it gives up blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import IdentityMismatch
from radixkv.identity.identity import CacheIdentity
from radixkv.lease import Lease
from radixkv.nodes import MAX_EDGE_BYTES, Node
from radixkv.shrinking import evict
from radixkv.siblings import SortedKeys
from radixkv.tokens import encode

MODEL = CacheIdentity.local("m", 2)


def encoded(text: str) -> bytes:
    return encode([ord(c) for c in text])


class Forest:
    """A tree of blocks of two tokens, a token a letter, and short ways to fill it and to ask it."""

    def __init__(self, capacity: int = 32) -> None:
        self.cache = PrefixCache(capacity, 2)
        self.tree = self.cache.tree
        self.pool = self.cache.pool

    def insert(self, text: str) -> list[int]:
        """Put in a text, computed from scratch, with its tail; return its blocks."""
        with self.cache.open(self.cache.acquire(MODEL, b"")) as table:
            table.reserve(len(text))
            table.commit(len(text))
            table.publish(encoded(text), tail=True)
            found: list[int] = table.blocks.tolist()
        return found

    def match(self, text: str) -> int:
        return self.cache.lookup(MODEL, encoded(text), max_cached=len(text))

    def hold(self, text: str) -> Lease:
        """Hold what is resident of a text."""
        return self.cache.acquire(MODEL, encoded(text), max_cached=len(text))

    def use(self, text: str) -> None:
        self.hold(text).release()

    def evict(self, n: int) -> int:
        return evict(self.tree, n, self.tree.accounts.of(None))

    def node(self, text: str) -> Node:
        """The node on whose edge a resident text ends."""
        node = self.tree.match(MODEL, encoded(text), 4 * len(text))[4]
        assert node is not None
        return node

    def edges(self) -> list[str]:
        """Each edge as its letters, depth first, deeper ones indented."""
        lines: list[str] = []

        def walk(node: Node, depth: int) -> None:
            for key in sorted(node.children or {}):
                child = (node.children or {})[key]
                lines.append("  " * depth + child.key[3::4].decode())
                walk(child, depth + 1)

        for root in self.tree.roots.values():
            walk(root, 0)
        return lines

    def check(self) -> None:
        assert self.cache.check() == []


def test_an_edge_spans_many_blocks_and_splits_where_paths_part() -> None:
    f = Forest()
    f.insert("aabbccdd")
    assert f.edges() == ["aabbccdd"]
    f.insert("aabbxxyy")
    assert f.edges() == ["aabb", "  ccdd", "  xxyy"]
    assert f.tree.num_nodes == 3
    f.check()


def test_a_leaf_grows_in_place() -> None:
    f = Forest()
    f.insert("aabb")
    f.insert("aabbcc")
    assert f.edges() == ["aabbcc"]
    f.check()


def test_a_match_counts_tokens_and_changes_nothing() -> None:
    f = Forest()
    f.insert("aabbccdd")
    f.insert("aabbcxyy")
    before = (f.edges(), f.tree.version, f.pool.counts.tolist(), f.tree.clock, f.tree.evictable)
    texts = ["", "a", "aa", "aab", "aabb", "aabbc", "aabbcc", "aabbcz", "aabbcxyyz", "b", "aabx"]
    assert [f.match(t) for t in texts] == [0, 1, 2, 3, 4, 5, 6, 5, 8, 0, 3]
    after = (f.edges(), f.tree.version, f.pool.counts.tolist(), f.tree.clock, f.tree.evictable)
    assert before == after


def test_paths_that_part_inside_a_block_are_siblings_that_share_its_beginning() -> None:
    f = Forest()
    f.insert("aabx")
    f.insert("aaby")
    assert f.edges() == ["aa", "  bx", "  by"]
    assert [f.match(t) for t in ("aabx", "aaby", "aabz")] == [4, 4, 3]


def test_a_tail_is_found_and_replaced_by_what_contains_it() -> None:
    f = Forest()
    tail = f.insert("aab")[1]
    assert f.edges() == ["aa", "  b"] and f.match("aabq") == 3
    f.insert("aabccc")
    assert f.edges() == ["aabccc"], "the tail is gone and the leaf has grown in place"
    assert f.pool.counts[tail] == 0
    f.check()


def test_a_tail_that_is_the_beginning_of_something_is_not_kept() -> None:
    f = Forest()
    f.insert("aabb")
    f.insert("aab")
    assert f.edges() == ["aabb"] and f.tree.num_blocks == 2
    f.insert("aac")
    assert f.edges() == ["aa", "  bb", "  c"]
    f.insert("aac")
    assert f.tree.num_blocks == 3
    f.check()


def test_equal_blocks_are_kept_once() -> None:
    f = Forest()
    first = f.insert("aabbcc")
    second = f.insert("aabbccdd")
    assert second[:3] == first and f.tree.num_deduplicated == 3
    assert f.tree.num_blocks == 4 and f.pool.free == 28
    f.check()


def test_nodes_join_again_when_a_sibling_goes() -> None:
    f = Forest()
    f.insert("aabbxx")
    f.insert("aabbccdd")
    f.use("aabbccdd")  # use it, so that xx is the oldest
    assert f.edges() == ["aabb", "  ccdd", "  xx"]
    assert f.evict(1) == 1
    assert f.edges() == ["aabbccdd"] and f.tree.num_nodes == 1
    f.check()


def test_nothing_is_left_of_what_was_evicted() -> None:
    """No dead nodes, no empty roots."""
    f = Forest()
    for text in ("aabbcc", "aabbdd", "ccddeef", "q"):
        f.insert(text)
    f.evict(100)
    assert f.tree.roots == {} and f.tree.num_nodes == 0 and f.pool.free == 32
    f.check()


def test_the_end_of_a_chain_goes_first() -> None:
    """EVICT-1: one block is needed of [1, 2, 3]: 3 goes, [1, 2] still hit."""
    f = Forest()
    f.insert("aabbcc")
    assert f.evict(1) == 1
    assert f.edges() == ["aabb"] and f.match("aabbcc") == 4


def test_the_oldest_goes_first_block_by_block() -> None:
    f = Forest()
    f.insert("aabbcc")
    f.insert("xxyyzz")
    f.use("aabbcc")
    gone = []
    for _ in range(6):
        before = set(f.edges())
        f.evict(1)
        gone.append(before - set(f.edges()))
    assert gone == [{"xxyyzz"}, {"xxyy"}, {"xx"}, {"aabbcc"}, {"aabb"}, {"aa"}]


def test_a_touch_refreshes_only_what_matched() -> None:
    f = Forest()
    f.insert("aabbcc")
    f.insert("xxyy")
    f.use("aa")
    f.evict(2)
    assert f.edges() == ["aa", "xxyy"], "the rest of the edge kept its age"
    f.evict(2)
    assert f.edges() == ["aa"]


def test_what_is_held_stays_and_what_is_behind_it_goes() -> None:
    """LEAK-3: the matched leaf itself is protected."""
    f = Forest()
    f.insert("aabbccdd")
    held = f.hold("aabb")
    assert f.tree.evictable == 2
    assert f.evict(10) == 2
    assert f.edges() == ["aabb"] and f.evict(1) == 0
    f.check()
    held.release()
    assert f.tree.evictable == 2 and f.evict(10) == 2
    f.check()


def test_the_count_of_evictable_blocks_survives_splits_under_a_hold() -> None:
    """LEAK-7: split while held, let go afterwards; never negative, always exact."""
    f = Forest()
    f.insert("aabbccdd")
    held = f.hold("aabbcc")
    f.insert("aaxx")
    assert f.edges() == ["aa", "  bbccdd", "  xx"]
    assert f.tree.evictable == 2
    f.check()
    held.release()
    assert f.tree.evictable == 5
    f.check()


def test_a_parent_becomes_a_leaf_at_its_own_age() -> None:
    f = Forest()
    f.insert("aabb")  # becomes the parent of the next
    f.insert("aabbcc")
    f.insert("xx")
    f.use("aabb")
    f.evict(2)
    assert f.edges() == ["aabb"], "cc and xx were older"


def test_long_paths_are_chains_of_edges_that_are_cheap_to_cut() -> None:
    identity = CacheIdentity.local("m", 256)
    cache = PrefixCache(600, 256)
    tokens = encode(np.arange(600 * 256))
    with cache.open(cache.acquire(identity, tokens)) as table:
        table.reserve(600 * 256)
        table.commit(600 * 256)
        table.publish(tokens)
        assert cache.evictable_blocks == 0 and cache.check() == []
    assert cache.tree.num_nodes == -(-len(tokens) // MAX_EDGE_BYTES)
    assert cache.lookup(identity, tokens, max_cached=600 * 256) == 600 * 256
    assert evict(cache.tree, 100, cache.accounts.of(None)) == 100
    assert cache.lookup(identity, tokens) == 500 * 256
    assert cache.check() == []


def test_an_identity_of_another_block_size_is_refused() -> None:
    f = Forest()
    other = CacheIdentity.local("m", 16)
    with pytest.raises(IdentityMismatch, match="blocks of 16 tokens"):
        f.tree.root(other)


def test_nodes_that_a_hold_keeps_apart_join_when_it_goes() -> None:
    f = Forest()
    f.insert("aabbxx")
    held = f.hold("aabb")
    f.insert("aabbccdd")
    f.use("aabbccdd")
    assert f.evict(1) == 1
    assert f.edges() == ["aabb", "  ccdd"], "somebody is between the two"
    f.check()
    held.release()
    assert f.edges() == ["aabbccdd"] and f.tree.num_nodes == 1
    f.check()


def test_a_hold_finds_its_place_again_whatever_splits_joins_or_goes_below_it() -> None:
    f = Forest()
    f.insert("aabbccddee")
    holds = [f.hold(text) for text in ("aa", "aabb", "aabbccdd", "aab")]
    f.insert("aabbxx")
    f.insert("aayy")
    assert f.edges() == ["aa", "  bb", "    ccddee", "    xx", "  yy"]
    f.check()
    holds.pop(2).release()  # from the lowest node, which was the whole edge
    assert f.evict(10) == 5 and f.edges() == ["aa", "  bb"]
    f.check()
    f.insert("aabbccddee")
    f.check()
    while holds:
        holds.pop().release()
        f.check()
    assert f.edges() == ["aabbccddee"], "nobody keeps them apart"
    assert f.evict(10) == 5


def test_a_leaf_that_grows_is_held_no_further_by_those_who_held_all_of_it() -> None:
    f = Forest()
    f.insert("aabb")
    held = [f.hold("aabb"), f.hold("aabb"), f.hold("aa")]
    f.insert("aabbccdd")
    assert f.edges() == ["aabbccdd"] and f.node("aabbccdd").ends == {1: 1, 2: 2}
    assert f.tree.evictable == 2 and f.evict(10) == 2
    f.check()
    f.insert("aabbee")
    assert f.tree.evictable == 1
    held.pop(0).release()
    assert f.tree.evictable == 1
    held.pop(0).release()
    assert f.tree.evictable == 2
    held.pop(0).release()
    assert f.tree.evictable == 3 and f.node("aabbee").ends is None
    f.check()


def test_an_edge_remembers_each_use_that_ended_inside_it() -> None:
    f = Forest()
    f.insert("aabbccddeeff")
    f.insert("xx")
    for text in ("aabbccdd", "aabbcc", "xx", "aabbccdde", "aa", "aa"):
        f.use(text)
    # Use of a part of a block is use of the block.
    assert [depth for depth, _ in f.node("aabbccddeeff").steps or []] == [5, 1]
    gone = []
    for _ in range(7):
        before = f.edges()
        f.evict(1)
        gone.append((set(before) - set(f.edges())).pop()[-1])
    assert "".join(gone) == "fxedcba"


def test_the_uses_inside_an_edge_are_parted_with_it_and_joined_again() -> None:
    f = Forest()
    f.insert("aabbccddee")
    for text in ("aabbccdd", "aabb", "aa"):
        f.use(text)
    f.insert("aabbxx")
    assert f.edges() == ["aabb", "  ccddee", "  xx"]
    f.check()
    f.evict(1)
    assert f.edges() == ["aabb", "  ccdd", "  xx"], "ee was used before all else"
    f.use("xx")
    f.use("aabbccdd")
    f.evict(1)
    assert f.edges() == ["aabbccdd"]
    assert f.node("aabbccdd").steps is None, "a use of all is the last of all its blocks"
    f.use("aabb")
    f.evict(2)
    assert f.edges() == ["aabb"]
    f.check()


def test_a_parent_was_used_whenever_a_child_was_that_is_no_more() -> None:
    f = Forest()
    f.insert("aaxx")
    f.insert("aayy")
    f.insert("zz")
    f.use("aaxx")  # and so aa, after zz
    left = []
    for _ in range(4):
        f.evict(1)
        left.append([text for text in ("aaxx", "aayy", "zz", "aa") if f.match(text) == len(text)])
    assert left == [["aaxx", "zz", "aa"], ["aaxx", "aa"], ["aa"], []]


def test_a_tail_that_is_superseded_while_held_lives_on_for_its_holder() -> None:
    """COW-1: the copy that waits for it must find what it was promised."""
    f = Forest()
    tail = f.insert("aab")[1]
    held = f.hold("aabq")
    assert held.cached_tokens == 3 and held.blocks[1] == tail
    f.insert("aabbcc")
    assert f.edges() == ["aabbcc"]
    assert f.pool.references(tail) == 1 and f.tree.evictable == 2
    f.check()
    assert f.evict(10) == 2 and f.edges() == ["aa"], "what is before it is held too"
    f.insert("aaxx")
    assert f.edges() == ["aaxx"]
    f.check()
    held.release()
    assert f.pool.references(tail) == 0 and f.tree.evictable == 2
    f.check()


def test_a_damaged_tree_is_described_not_raised() -> None:
    """LEAK-2: a violation is a line in a report."""
    f = Forest()
    f.insert("aabbcc")
    f.insert("aaxx")
    f.tree.evictable += 1
    assert "5 blocks are evictable by count, 4 by walk" in f.cache.check()
    f.tree.evictable -= 1
    node = f.node("aabbcc")
    node.locks += 1
    wrong = f.cache.check()
    assert any("1 locks for 0 holds and 0 locked children" in line for line in wrong)
    node.locks -= 1
    node.ends = {2: 1}
    assert any("knows of holds to {2: 1}" in line for line in f.cache.check())
    node.ends = None
    for steps in ([(2, 1)], [(2, 50)], [(2, 3), (3, 4)], []):
        node.steps = steps
        assert any("use" in line for line in f.cache.check()), steps
    node.steps = None
    node.start += 1
    assert any("begins at a depth" in line for line in f.cache.check())
    node.start -= 1
    f.check()
    f.tree.accounts.of(None).leaves.discard(node)
    assert any("can never be evicted" in line for line in f.cache.check())
    f.tree.accounts.of(None).leaves.add(node)
    f.check()
    node.blocks[0] = 31
    assert len(f.cache.check()) > 1
    node.blocks = None  # type: ignore[assignment]
    assert any("cannot be read" in line for line in f.cache.check())


def test_sorted_keys_know_their_neighbours_through_many_runs() -> None:
    rng = random.Random(3)
    keys = SortedKeys(2)
    model: list[bytes] = []
    for _ in range(6000):
        key = rng.randbytes(2)
        if key in model:
            if rng.random() < 0.5:
                keys.remove(key)
                model.remove(key)
        else:
            keys.add(key)
            model.append(key)
    model.sort()
    assert keys.keys() == model and keys.check() == []
    for _ in range(500):
        query = rng.randbytes(rng.choice([1, 2, 3]))
        below = [k for k in model if k < query]
        above = [k for k in model if k >= query]
        expected = (below[-1] if below else None, above[0] if above else None)
        assert keys.around(query) == expected
    for key in model:
        keys.remove(key)
    assert keys.keys() == [] and keys.around(b"x") == (None, None)
