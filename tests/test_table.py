"""Block tables: room to write, copies before writes, forks and what is let go."""

from __future__ import annotations

import pytest

from radixkv.blocks import BlockCopy
from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.identity.identity import CacheIdentity
from radixkv.shrinking import evict
from radixkv.table import BlockTable
from radixkv.tokens import encode

SIZE = 4
MODEL = CacheIdentity.local("m", SIZE)


def begin(cache: PrefixCache, ids: list[int]) -> BlockTable:
    return cache.open(cache.acquire(MODEL, encode(ids)))


def fill(table: BlockTable, n: int) -> list[BlockCopy]:
    copies = table.reserve(n)
    table.commit(n)
    return copies


def test_blocks_come_on_demand_and_waste_is_less_than_one() -> None:
    cache = PrefixCache(16, SIZE)
    table = begin(cache, [])
    for n in range(1, 20):
        assert table.blocks_needed(1) == (1 if n % SIZE == 1 else 0)
        assert fill(table, 1) == []
        assert table.num_tokens == n and len(table.blocks) == -(-n // SIZE)
    assert cache.free_blocks == 16 - 5


def test_four_samples_share_a_block_and_the_third_to_write_leaves_three_behind_one() -> None:
    """COW-1, and the literal example: block 7 goes from 4 references to 3, the copy has 1."""
    cache = PrefixCache(16, SIZE)
    tables = [begin(cache, [])]
    fill(tables[0], 7 * SIZE + 2)  # blocks 0 to 7, the last with two tokens
    tables += [tables[0].fork() for _ in range(3)]
    assert tables[0].blocks[7] == 7 and cache.pool.counts[7] == 4
    (copy,) = tables[2].reserve(1)
    tables[2].commit(1)
    assert copy == (7, 8, 2)
    assert cache.pool.counts[7] == 3 and cache.pool.counts[8] == 1
    assert [int(t.blocks[7]) for t in tables] == [7, 7, 8, 7]
    assert len(fill(tables[0], 1)) == 1 and len(fill(tables[3], 1)) == 1
    assert fill(tables[1], 1) == [], "the last writes in place"
    assert tables[1].blocks[7] == 7 and cache.stats().cow_copies == 3
    assert cache.check() == []


def test_sharers_that_reserve_in_one_step_make_one_copy_less_than_they_are() -> None:
    """k - 1 copies also when all reserve before any of them has run."""
    cache = PrefixCache(16, SIZE)
    tables = [begin(cache, [])]
    fill(tables[0], 2)
    tables += [tables[0].fork() for _ in range(3)]
    copies = [copy for table in tables for copy in table.reserve(1)]
    assert [copy.source for copy in copies] == [0, 0, 0]
    assert len({copy.target for copy in copies}) == 3
    assert tables[3].blocks[0] == 0
    for table in tables:
        table.commit(1)
    assert cache.pool.counts[:4].tolist() == [1, 1, 1, 1] and cache.check() == []


def test_the_last_of_the_sharers_does_not_write_over_what_others_are_yet_to_copy() -> None:
    cache = PrefixCache(16, SIZE)
    long, short = begin(cache, []), None
    fill(long, 3)
    short = long.fork()
    short.truncate(1)
    assert long.reserve(1) == [(0, 1, 3)]
    assert short.reserve(1) == [(0, 2, 1)], "position 1 is still to be read by the other's copy"


@pytest.mark.parametrize("offset", range(SIZE))
def test_forks_at_every_offset_write_apart(offset: int) -> None:
    """COW-3: four ways, each equal to a linear run, the parent unchanged."""
    cache = PrefixCache(32, SIZE)
    device = [[-1] * SIZE for _ in range(32)]

    def write(table: BlockTable, values: list[int]) -> None:
        for value in values:
            for source, target, n in table.reserve(1):
                device[target][:n] = device[source][:n]
            at = table.num_tokens
            device[table.blocks[at // SIZE]][at % SIZE] = value
            table.commit(1)

    def read(table: BlockTable) -> list[int]:
        return [device[table.blocks[i // SIZE]][i % SIZE] for i in range(table.num_tokens)]

    parent = begin(cache, [])
    prompt = list(range(SIZE + offset))
    write(parent, prompt)
    forks = [parent.fork() for _ in range(4)]
    for i, fork in enumerate(forks):
        write(fork, [100 * i + j for j in range(6)])
    for i, fork in enumerate(forks):
        assert read(fork) == prompt + [100 * i + j for j in range(6)]
    assert read(parent) == prompt
    for table in (parent, *forks):
        table.release()
    assert cache.free_blocks == 32


def test_a_partial_hit_is_copied_before_it_is_written_behind() -> None:
    cache = PrefixCache(16, SIZE)
    with begin(cache, []) as table:
        fill(table, 6)
        table.publish(encode(range(6)), tail=True)
    table = begin(cache, [0, 1, 2, 3, 4, 9, 9])
    assert table.num_tokens == table.cached_tokens == 5
    (copy,) = table.reserve(2)
    assert copy.num_valid == 1 and copy.source == 1 and copy.target == table.blocks[1]
    assert copy.source in table.references() and cache.evictable_blocks == 0, "until it is copied"
    table.commit(2)
    assert copy.source not in table.references() and cache.evictable_blocks == 1
    assert cache.check() == []


def test_a_refusal_changes_nothing() -> None:
    cache = PrefixCache(4, SIZE)
    with begin(cache, []) as table:
        fill(table, 2 * SIZE)
        table.publish(encode(range(8)))
    busy = begin(cache, [])
    fill(busy, 2 * SIZE)
    table = begin(cache, [*range(8), 8])  # holds the two that are cached
    counts, version = cache.pool.counts.tolist(), cache.version
    with pytest.raises(OutOfBlocks) as e:
        table.reserve(5)
    assert (e.value.need, e.value.free, e.value.evictable) == (2, 0, 0)
    assert cache.pool.counts.tolist() == counts and cache.version == version
    assert table.num_tokens == 8 and len(table.blocks) == 2


def test_a_sequence_that_fits_exactly_is_not_stopped_by_what_it_would_copy() -> None:
    """The copy's source takes up the copy's room: then it leaves the tree instead."""
    cache = PrefixCache(2, SIZE)
    with begin(cache, []) as table:
        fill(table, 2 * SIZE)
        table.publish(encode(range(8)))
    table = begin(cache, range(8))  # type: ignore[arg-type]
    assert table.num_tokens == 7 and cache.available == 0
    assert table.blocks_needed(1) == 0
    assert table.reserve(1) == [], "written in place"
    table.commit(1)
    assert cache.cached_blocks == 1 and cache.check() == []
    table.publish(encode(range(8)))
    assert cache.cached_blocks == 2


def test_published_blocks_stay_and_the_rest_is_free() -> None:
    cache = PrefixCache(8, SIZE)
    table = begin(cache, [])
    fill(table, 10)
    table.publish(encode(range(10)))
    table.release()
    table.release()
    assert (cache.cached_blocks, cache.free_blocks, cache.available) == (2, 6, 8)
    other = begin(cache, [7] * 9)
    fill(other, 9)
    other.release()
    assert (cache.cached_blocks, cache.free_blocks) == (2, 6)


def test_publishing_is_incremental() -> None:
    """CORRECT-4: keys of later chunks are those of the whole sequence."""
    cache = PrefixCache(64, SIZE)
    prompt = list(range(200))
    table = begin(cache, prompt)
    for chunk in (100, 33, 67):
        fill(table, chunk)
        table.publish(encode(prompt))
        version = cache.version
        table.publish(encode(prompt))
        assert cache.version == version, "nothing new, nothing done"
    for shared in (100, 116, 200):
        other = prompt[:shared] + [999] * 20
        assert cache.lookup(MODEL, encode(other)) == shared
    assert cache.stats().nodes == 1 and cache.check() == []


def test_two_that_computed_the_same_keep_one_copy() -> None:
    """CORRECT-9: eight identical cold prompts in one batch."""
    cache = PrefixCache(64, SIZE)
    tables = [begin(cache, [1] * 11) for _ in range(8)]
    for table in tables:
        fill(table, 11)
    for table in tables:
        table.publish(encode([1] * 11))
    assert all(t.blocks[:2].tolist() == tables[0].blocks[:2].tolist() for t in tables)
    assert len({int(t.blocks[2]) for t in tables}) == 8
    assert cache.stats().deduplicated_blocks == 14
    for table in tables:
        table.release()
    assert (cache.cached_blocks, cache.free_blocks) == (2, 62) and cache.check() == []


def test_a_truncated_table_writes_to_blocks_of_its_own() -> None:
    cache = PrefixCache(16, SIZE)
    table = begin(cache, [])
    fill(table, 12)
    table.publish(encode(range(12)))
    table.truncate(6)
    assert table.num_tokens == 6 and len(table.blocks) == 2
    assert cache.evictable_blocks == 1
    (copy,) = table.reserve(1)
    assert copy.num_valid == 2 and cache.lookup(MODEL, encode(range(13))) == 12
    table.commit(1)
    table.publish(encode([0, 1, 2, 3, 4, 5, 99]), tail=True)
    assert cache.lookup(MODEL, encode([0, 1, 2, 3, 4, 5, 99, 1])) == 7
    table.truncate(0)
    assert table.blocks.size == 0 and cache.check() == []
    assert cache.available == 16


def test_blocks_are_a_snapshot() -> None:
    cache = PrefixCache(16, SIZE)
    table = begin(cache, [])
    fill(table, 5)
    before = table.blocks
    fill(table, 8)
    assert before.dtype == "int32" and before.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda t: t.commit(1), "commit"),
        (lambda t: t.reserve(-1), "reserve"),
        (lambda t: t.truncate(9), "truncate"),
        (lambda t: t.publish(encode([1])), "tokens given"),
    ],
)
def test_what_cannot_be_is_refused_by_name(act: object, what: str) -> None:
    cache = PrefixCache(8, SIZE)
    table = begin(cache, [])
    fill(table, 8)
    with pytest.raises(ValueError, match=what):
        act(table)  # type: ignore[operator]
    table.release()
    with pytest.raises(ValueError, match="released"):
        table.reserve(1)


def test_a_table_frees_everything_at_every_stage() -> None:
    """LEAK-1: after acquire, after reserve, after the copy, after commit, after publish."""
    cache = PrefixCache(16, SIZE)
    with begin(cache, []) as table:
        fill(table, 6)
        table.publish(encode(range(6)), tail=True)
    counts, available = cache.pool.counts.tolist(), cache.available
    for stage in range(4):
        table = begin(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8])
        assert table.num_tokens == 6
        if stage > 0:
            table.reserve(3)
        if stage > 1:
            table.commit(3)
        if stage > 2:
            twin = table.fork()
            twin.reserve(2)
            twin.release()
        table.release()
        assert cache.pool.counts.tolist() == counts and cache.available == available
        assert cache.check() == []


def test_a_copy_that_is_yet_to_be_made_is_not_published() -> None:
    """CORRECT-3: the target holds nothing until the device has run."""
    cache = PrefixCache(8, SIZE)
    with begin(cache, []) as table:
        fill(table, 4)
        table.publish(encode([1, 2, 3, 4]))
    table = begin(cache, [1, 2, 3, 9])
    assert len(table.reserve(1)) == 1
    before = cache.cached_blocks
    table.publish(encode([1, 2, 3, 9]), tail=True)
    assert cache.cached_blocks == before
    table.truncate(2)
    table.publish(encode([1, 2]), tail=True)
    assert cache.cached_blocks == before and cache.check() == []


def test_a_tail_that_others_wait_to_copy_is_not_published_anew_until_they_have() -> None:
    cache = PrefixCache(8, SIZE)
    table = begin(cache, [])
    fill(table, 2)
    table.publish(encode([1, 2]), tail=True)
    waiting = begin(cache, [1, 2, 7])
    with begin(cache, [1, 2, 3, 9]) as longer:
        fill(longer, 1)
        longer.publish(encode([1, 2, 3]), tail=True)
    # The longer one goes, which had taken the place of ours.
    evict(cache.tree, 1, cache.accounts.of(None))
    table.publish(encode([1, 2]), tail=True)
    assert cache.cached_blocks == 0 and cache.check() == []
    waiting.release()
    table.publish(encode([1, 2]), tail=True)
    assert cache.lookup(MODEL, encode([1, 2, 7])) == 2 and cache.check() == []


def test_a_parent_that_was_never_let_go_queues_when_it_becomes_a_leaf() -> None:
    cache = PrefixCache(3, SIZE)
    table = begin(cache, [])
    fill(table, 6)
    table.publish(encode(range(6)), tail=True)
    fill(table, 1)  # a copy; the tail is nobody's now
    other = begin(cache, [9])
    other.reserve(4)  # takes the tail's block
    assert cache.cached_blocks == 1 and cache.check() == []
    table.release()
    other.reserve(12)
    assert cache.cached_blocks == 0 and cache.check() == []


def test_of_two_that_share_a_tail_the_tree_has_let_go_one_copies_and_one_writes_in_place() -> None:
    """COW-1: k - 1 copies also of a tail that was replaced by a longer one."""
    cache = PrefixCache(16, SIZE)
    with begin(cache, []) as table:
        fill(table, 2)
        table.publish(encode([1, 2]), tail=True)
    first, second = begin(cache, [1, 2, 7]), begin(cache, [1, 2, 8])
    with begin(cache, [1, 2, 3, 9]) as longer:
        fill(longer, 1)
        longer.publish(encode([1, 2, 3]), tail=True)
    assert first.blocks.tolist() == second.blocks.tolist() and cache.cached_blocks == 1
    assert cache.free_blocks == 16 - 2 and cache.check() == []
    assert first.blocks_needed(1) == 1
    (copy,) = fill(first, 1)
    assert copy == (int(second.blocks[0]), int(first.blocks[0]), 2)
    assert second.blocks_needed(1) == 0 and fill(second, 1) == []
    assert cache.check() == []
    for each, token in ((first, 7), (second, 8)):
        each.publish(encode([1, 2, token]), tail=True)
        each.release()
    assert (cache.cached_blocks, cache.available) == (3, 16) and cache.check() == []


def test_a_tail_published_behind_reserved_room_is_taken_back_when_that_is_filled() -> None:
    """It grows as a tail, and gives way to the whole block; but not while others wait for it."""
    cache = PrefixCache(8, SIZE)
    table = begin(cache, [])
    fill(table, 1)
    table.reserve(9)
    table.publish(encode([1]), tail=True)
    assert cache.lookup(MODEL, encode([1, 2, 3, 9])) == 1
    table.commit(1)
    table.publish(encode([1, 2]), tail=True)
    assert cache.lookup(MODEL, encode([1, 2, 3, 9])) == 2 and cache.cached_blocks == 1
    waiting = begin(cache, [1, 2, 5])
    table.commit(1)
    table.publish(encode([1, 2, 3]), tail=True)
    assert cache.lookup(MODEL, encode([1, 2, 3, 9])) == 2, "it has to wait"
    table.commit(7)
    table.publish(encode([1, 2, 3, *range(7)]))
    assert cache.lookup(MODEL, encode([1, 2, 3, *range(7)])) == 2, "so has what follows"
    assert cache.check() == []
    waiting.release()
    table.publish(encode([1, 2, 3, *range(7)]), tail=True)
    assert cache.lookup(MODEL, encode([1, 2, 3, *range(8)])) == 10
    assert cache.stats().evicted_blocks == 0 and cache.check() == []


def test_forks_hold_through_the_tree_what_one_of_them_publishes() -> None:
    cache = PrefixCache(16, SIZE)
    parent = begin(cache, [])
    fill(parent, 10)
    twins = [parent.fork() for _ in range(2)]
    twins[1].truncate(6)
    twins[0].publish(encode(range(10)))
    assert [t.num_published for t in (parent, *twins)] == [2, 2, 1]
    assert cache.pool.counts[:3].tolist() == [1, 1, 2] and cache.evictable_blocks == 0
    assert cache.check() == []
    twins[0].release()
    parent.release()
    assert cache.cached_blocks == 2 and cache.evictable_blocks == 0, "one uses both blocks yet"
    assert cache.check() == []
    twins[1].truncate(4)
    assert cache.evictable_blocks == 1
    twins[1].release()
    assert (cache.evictable_blocks, cache.free_blocks) == (2, 14) and cache.check() == []


def test_a_fork_that_holds_duplicates_keeps_its_blocks_out() -> None:
    """Else it would hold a block of the tree without those before it."""
    cache = PrefixCache(16, SIZE)
    parent = begin(cache, [])
    fill(parent, 8)
    twin = parent.fork()
    with begin(cache, []) as other:
        fill(other, 4)
        other.publish(encode(range(4)))
    parent.publish(encode(range(8)))
    assert parent.num_published == 1 and twin.num_published == 0
    assert parent.blocks[0] != twin.blocks[0] and parent.blocks[1] == twin.blocks[1]
    assert cache.cached_blocks == 1 and cache.check() == []
    twin.release()
    parent.publish(encode(range(8)))
    assert parent.num_published == 2 and cache.check() == []


def test_what_a_fork_is_yet_to_copy_is_published_when_it_has() -> None:
    cache = PrefixCache(16, SIZE)
    parent = begin(cache, [])
    fill(parent, 2)
    twin = parent.fork()
    assert len(twin.reserve(1)) == 1
    fill(parent, 2)
    parent.publish(encode(range(4)))
    assert cache.cached_blocks == 0 and cache.stats().identities == 0 and cache.check() == []
    twin.commit(1)
    parent.publish(encode(range(4)))
    assert cache.cached_blocks == 1 and cache.check() == []
    twin.release()
    parent.release()
    assert cache.available == 16


def test_what_waits_to_be_copied_outlives_a_truncation() -> None:
    cache = PrefixCache(4, SIZE)
    with begin(cache, []) as table:
        fill(table, 12)
        table.publish(encode(range(12)))
    table = begin(cache, [*range(10), 99])
    (copy,) = table.reserve(1)
    table.truncate(3)
    assert cache.evictable_blocks == 0 and copy.source in table.references()
    assert cache.check() == []
    table.commit(0)
    assert cache.evictable_blocks == 2 and cache.check() == []
    table.release()
    assert cache.available == 4
