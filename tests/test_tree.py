"""The tree: splits, joins, tails and the order in which it gives up blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv import audit
from radixkv.blocks import BlockIds, BlockPool
from radixkv.errors import IdentityMismatch
from radixkv.identity.identity import CacheIdentity
from radixkv.nodes import MAX_EDGE_BYTES, Node
from radixkv.siblings import SortedKeys
from radixkv.tokens import encode
from radixkv.tree import NO_PLACE, RadixTree

MODEL = CacheIdentity.local("m", 2)


class Forest:
    """A tree of blocks of two tokens, and short ways to fill it and to ask it."""

    def __init__(self, capacity: int = 32) -> None:
        self.pool = BlockPool(capacity)
        self.tree = RadixTree(self.pool, 2)

    def insert(self, text: str) -> list[int]:
        """Insert a text, a token a letter, its tail too if its length is odd; return its blocks."""
        tokens = encode([ord(c) for c in text])
        ids = self.pool.take((len(text) + 1) // 2)
        whole = len(text) // 2
        place = self.tree.insert(MODEL, tokens, ids[:whole], 0, NO_PLACE)
        if len(text) % 2:
            self.tree.insert_tail(MODEL, tokens, ids, place)
        found: list[int] = ids.tolist()
        self.tree.release(ids, whole)
        return found

    def match(self, text: str) -> int:
        tokens = encode([ord(c) for c in text])
        _, num_whole, _, num_valid, _ = self.tree.match(MODEL, tokens, len(tokens))
        return 2 * num_whole + num_valid

    def hold(self, text: str) -> BlockIds:
        """Hold the whole blocks of a resident text."""
        tokens = encode([ord(c) for c in text])
        runs = self.tree.match(MODEL, tokens, len(tokens))[0]
        ids = np.array([block for run in runs for block in run], np.int64)
        self.tree.hold(ids)
        return ids

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

    def check(self, held: list[int] | None = None) -> None:
        assert audit.check(self.tree, held or []) == []


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
    before = (f.edges(), f.tree.version, f.pool.counts.tolist(), f.tree.leaves.used.tolist())
    texts = ["", "a", "aa", "aab", "aabb", "aabbc", "aabbcc", "aabbcz", "aabbcxyyz", "b", "aabx"]
    assert [f.match(t) for t in texts] == [0, 1, 2, 3, 4, 5, 6, 5, 8, 0, 3]
    after = (f.edges(), f.tree.version, f.pool.counts.tolist(), f.tree.leaves.used.tolist())
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
    f.tree.release(f.hold("aabbccdd"), 4)  # use it, so that xx is the oldest
    assert f.edges() == ["aabb", "  ccdd", "  xx"]
    assert f.tree.evict(1) == 1
    assert f.edges() == ["aabbccdd"] and f.tree.num_nodes == 1
    f.check()


def test_nothing_is_left_of_what_was_evicted() -> None:
    """No dead nodes, no empty roots."""
    f = Forest()
    for text in ("aabbcc", "aabbdd", "ccddeef", "q"):
        f.insert(text)
    f.tree.evict(100)
    assert f.tree.roots == {} and f.tree.num_nodes == 0 and f.pool.free == 32
    f.check()


def test_the_end_of_a_chain_goes_first() -> None:
    """EVICT-1: one block is needed of [1, 2, 3]: 3 goes, [1, 2] still hit."""
    f = Forest()
    f.insert("aabbcc")
    assert f.tree.evict(1) == 1
    assert f.edges() == ["aabb"] and f.match("aabbcc") == 4


def test_the_oldest_goes_first_block_by_block() -> None:
    f = Forest()
    f.insert("aabbcc")
    f.insert("xxyyzz")
    f.tree.release(f.hold("aabbcc"), 3)
    gone = []
    for _ in range(6):
        before = set(f.edges())
        f.tree.evict(1)
        gone.append(before - set(f.edges()))
    assert gone == [{"xxyyzz"}, {"xxyy"}, {"xx"}, {"aabbcc"}, {"aabb"}, {"aa"}]


def test_a_touch_refreshes_only_what_matched() -> None:
    f = Forest()
    f.insert("aabbcc")
    f.insert("xxyy")
    f.tree.release(f.hold("aa"), 1)
    f.tree.evict(2)
    assert f.edges() == ["aa", "xxyy"], "the rest of the edge kept its age"
    f.tree.evict(2)
    assert f.edges() == ["aa"]


def test_what_is_held_stays_and_what_is_behind_it_goes() -> None:
    """LEAK-3: the matched leaf itself is protected."""
    f = Forest()
    f.insert("aabbccdd")
    held = f.hold("aabb")
    assert f.tree.evictable == 2
    assert f.tree.evict(10) == 2
    assert f.edges() == ["aabb"] and f.tree.evict(1) == 0
    f.check(held.tolist())
    f.tree.release(held, 2)
    assert f.tree.evictable == 2 and f.tree.evict(10) == 2
    f.check()


def test_the_count_of_evictable_blocks_survives_splits_under_a_hold() -> None:
    """LEAK-7: split while held, let go afterwards; never negative, always exact."""
    f = Forest()
    f.insert("aabbccdd")
    held = f.hold("aabbcc")
    f.insert("aaxx")
    assert f.edges() == ["aa", "  bbccdd", "  xx"]
    assert f.tree.evictable == 2
    f.check(held.tolist())
    f.tree.release(held, 3)
    assert f.tree.evictable == 5
    f.check()


def test_a_parent_becomes_a_leaf_at_its_own_age() -> None:
    f = Forest()
    f.insert("aabb")  # becomes the parent of the next
    f.insert("aabbcc")
    f.insert("xx")
    f.tree.release(f.hold("aabb"), 2)
    f.tree.evict(2)
    assert f.edges() == ["aabb"], "cc and xx were older"


def test_long_paths_are_chains_of_edges_that_are_cheap_to_cut() -> None:
    identity = CacheIdentity.local("m", 256)
    pool = BlockPool(600)
    tree = RadixTree(pool, 256)
    tokens = encode(np.arange(600 * 256))
    ids = pool.take(600)
    tree.insert(identity, tokens, ids, 0, NO_PLACE)
    assert tree.num_nodes == -(-len(tokens) // MAX_EDGE_BYTES)
    assert tree.match(identity, tokens, len(tokens))[1] == 600
    tree.release(ids, 600)
    assert tree.evict(100) == 100
    assert tree.match(identity, tokens, len(tokens))[1] == 500
    assert audit.check(tree, []) == []


def test_an_identity_of_another_block_size_is_refused() -> None:
    f = Forest()
    other = CacheIdentity.local("m", 16)
    with pytest.raises(IdentityMismatch, match="blocks of 16 tokens"):
        f.tree.insert(other, encode([1, 2]), f.pool.take(1), 0, NO_PLACE)


def test_a_fork_that_holds_duplicates_keeps_its_blocks_out() -> None:
    """Else it would hold a block of the tree without those before it."""
    f = Forest()
    ids = f.pool.take(2)  # two tables share them
    f.pool.share(ids)
    resident = f.insert("aa")
    tokens = encode([ord(c) for c in "aabb"])
    mine = ids.copy()
    node, num_blocks, moved = f.tree.insert(MODEL, tokens, mine, 0, (None, 0, False))
    assert (num_blocks, moved) == (1, True) and mine[0] == resident[0]
    f.check([*mine.tolist(), *ids.tolist()])
    f.tree.release(ids, 0)  # the other lets go, and then it may go in
    f.tree.insert(MODEL, tokens, mine, 1, (node, 1, True))
    assert f.edges() == ["aabb"]
    f.check(mine.tolist())


def test_a_damaged_tree_is_described_not_raised() -> None:
    """LEAK-2: a violation is a line in a report."""
    f = Forest()
    f.insert("aabbcc")
    f.insert("aaxx")
    f.tree.evictable += 1
    assert audit.check(f.tree, []) == ["5 blocks are evictable by count, 4 by walk"]
    f.tree.evictable -= 1
    assert any("held 2 times" in line for line in audit.check(f.tree, [0]))
    (root,) = f.tree.roots.values()
    assert root.children is not None
    node = next(iter(root.children.values()))
    node.blocks[0] = 31
    assert len(audit.check(f.tree, [])) > 2
    node.blocks = None  # type: ignore[assignment]
    assert any("cannot be read" in line for line in audit.check(f.tree, []))


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
