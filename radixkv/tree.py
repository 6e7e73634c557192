"""The radix tree: which blocks hold the KV of which token paths, one root per identity.

Knows token bytes, block ids and references; nothing of sequences, requests or tensors.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.blocks import BlockIds, BlockPool
from radixkv.errors import IdentityMismatch
from radixkv.eviction import LruLeaves
from radixkv.identity.identity import CacheIdentity
from radixkv.nodes import MAX_EDGE_BYTES, NOTHING, Match, Node, Root, match
from radixkv.tokens import TOKEN_BYTES, common_bytes

Place: TypeAlias = "tuple[Node | None, int, bool]"
"""Where a table's blocks lie in the tree, from one insert to the next.

node        the node that ends with the last of them, if one does: saves the next insert a walk
num_blocks  how many are in
moved       whether any was replaced by a resident one, so that forks may hold others
"""

NO_PLACE: Place = (None, 0, False)

_FEW = 4  # blocks up to which numpy costs more than it saves


class RadixTree:
    """Paths of tokens and the blocks that hold their KV; owns one reference to each block.

    Invariants: a block is in the tree once; whoever holds a block holds all before it on its path;
    ``evictable`` blocks are those that only the tree holds, and each can be evicted, last first.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.stride = block_size * TOKEN_BYTES  # bytes of a whole block's tokens
        self.roots: dict[CacheIdentity, Root] = {}
        self.leaves: LruLeaves[Node] = LruLeaves(pool)
        self.cached: npt.NDArray[np.bool_] = np.zeros(pool.capacity, np.bool_)
        self.num_blocks = 0
        self.num_nodes = 0
        self.evictable = 0
        self.version = 0  # moves with every change of what a look-up may answer
        self.num_published = self.num_deduplicated = self.num_evicted = 0  # blocks, ever

    def match(self, identity: CacheIdentity, tokens: bytes, limit: int) -> Match:
        """Return what is resident of ``tokens[:limit]`` (bytes); NOTHING if nothing can be."""
        root = self.roots.get(identity)
        return NOTHING if root is None else match(root, tokens, limit, self.stride)

    # -- holding -----------------------------------------------------------------------------------

    def hold(self, ids: BlockIds) -> None:
        """Add a reference to each of ``ids``, the beginning of a path in the tree."""
        counts = self.pool.counts
        held = counts[ids]
        if held.item(-1) == 1:  # counts do not rise along a path: the ones are at its end
            self.evictable -= len(ids) - int(held.argmin())
        counts[ids] = held + 1

    def release(self, ids: BlockIds, num_cached: int) -> None:
        """Take back a reference to each of ``ids``, and note that they were in use until now.

        ``ids`` follow one another in a path; the first ``num_cached`` are known to be in the tree,
        those behind may be. What nobody holds then is free.
        """
        self.leaves.clock += 1
        if num_cached:
            path = ids[:num_cached]
            counts = self.pool.counts
            held = counts[path]
            counts[path] = held - 1
            self.leaves.used[path] = self.leaves.clock
            if held.item(-1) == 2:
                self.evictable += num_cached - int(held.argmin())
                self.leaves.wake(path.item(-1))  # only the last of a path can end a leaf
        n = len(ids)
        if n - num_cached > _FEW:
            self._release_many(ids[num_cached:])
        else:
            for i in range(num_cached, n):
                self._release_one(ids.item(i))

    def release_source(self, block: int) -> None:
        """Release one block that was held to be copied from."""
        self.leaves.clock += 1
        self._release_one(block)

    def _release_one(self, block: int) -> None:
        left = self.pool.counts.item(block) - 1
        self.pool.counts[block] = left
        self.leaves.used[block] = self.leaves.clock
        if left == 0:
            self.pool.put_back_one(block)
        elif left == 1 and self.cached.item(block):
            self.evictable += 1
            self.leaves.wake(block)

    def _release_many(self, ids: BlockIds) -> None:
        left = self.pool.counts[ids] - 1
        self.pool.counts[ids] = left
        self.leaves.used[ids] = self.leaves.clock
        gone = ids[left == 0]
        if gone.size:
            self.pool.put_back(gone)
        idle = ids[(left == 1) & self.cached[ids]]
        if idle.size:
            self.evictable += idle.size
            self.leaves.wake(idle.item(-1))

    # -- growing -----------------------------------------------------------------------------------

    def insert(
        self, identity: CacheIdentity, tokens: bytes, ids: BlockIds, start: int, before: Place
    ) -> Place:
        """Put in the whole blocks ``ids[start:]``; those before are in, and the caller holds all.

        Where a block of equal tokens is resident, ``ids`` is pointed at it in place and the
        caller's own is let go. ``before`` is what the insert of ``ids[:start]`` returned.

        A fork that holds the blocks behind such a place does not hold the resident ones before
        them, which would break the tree's invariant; so there the insert ends at the first block
        that others hold, and goes on when it is tried again and they have let go.
        """
        hint, _, moved = before
        stride = self.stride
        end = len(ids) * stride
        node: Node
        if hint is not None and hint.blocks and hint.blocks[-1] == ids.item(start - 1):
            node, at = hint, start * stride
        else:
            node, at = self._root(identity), 0
        while at < end:
            child = node.children.get(tokens[at : at + stride]) if node.children else None
            if child is None:
                first = at // stride
                if moved:
                    end = at + self._num_own(ids[first:]) * stride
                    if end == at:
                        break
                node = self._attach(node, tokens[at:end], ids[first : end // stride])
                at = end
                break
            size = len(child.key)
            if size <= end - at and tokens.startswith(child.key, at):
                shared = size
            else:
                shared = common_bytes(tokens, at, end, child.key)
                shared -= shared % stride
            first, after = at // stride, (at + shared) // stride
            if after > start:
                skip = max(start - first, 0)
                resident = np.array(child.blocks[skip : after - first], np.int64)
                moved |= self._deduplicate(ids[first + skip : after], resident)
            at += shared
            if shared == size:
                node = child
            elif at == end:
                return None, at // stride, moved
            else:
                node = child.split(shared // stride, stride)
                self.num_nodes += 1
        return node, at // stride, moved

    def insert_tail(
        self, identity: CacheIdentity, tokens: bytes, ids: BlockIds, before: Place
    ) -> None:
        """Put in the partial block ``ids[-1]``; ``tokens`` end with its tokens, the rest is in.

        Does nothing where a resident block begins with the same tokens, nor for a fork's block
        that ``insert`` would not take.
        """
        num_whole = len(ids) - 1
        tail = tokens[num_whole * self.stride :]
        hint, _, moved = before
        if moved and not self._num_own(ids[-1:]):
            return
        node, offset = self._find(identity, tokens, ids[:num_whole], hint)
        if offset < len(node.blocks):
            if node.key.startswith(tail, offset * self.stride):
                return
            node = node.split(offset, self.stride)
            self.num_nodes += 1
        elif node.order is not None:
            after = node.order.around(tail)[1]
            if after is not None and after.startswith(tail):
                return
        self._attach(node, tail, ids[-1:])

    def _num_own(self, ids: BlockIds) -> int:
        """Return how many of ``ids`` come before the first that has other holders."""
        shared = np.flatnonzero(self.pool.counts[ids] > 1)
        return shared.item(0) if shared.size else len(ids)

    def _find(
        self, identity: CacheIdentity, tokens: bytes, ids: BlockIds, hint: Node | None
    ) -> tuple[Node, int]:
        """Return the node that holds the last of ``ids``, and how many of its blocks they reach."""
        if not len(ids):
            return self._root(identity), 0
        if hint is not None and hint.blocks and hint.blocks[-1] == ids.item(-1):
            return hint, len(hint.blocks)
        node: Node = self._root(identity)
        at, end = 0, len(ids) * self.stride
        while True:
            assert node.children is not None
            node = node.children[tokens[at : at + self.stride]]
            if at + len(node.key) >= end:
                return node, (end - at) // self.stride
            at += len(node.key)

    def _root(self, identity: CacheIdentity) -> Root:
        root = self.roots.get(identity)
        if root is None:
            self.expect(identity)
            root = self.roots[identity] = Root(identity)
        return root

    def expect(self, identity: CacheIdentity) -> None:
        """Raise IdentityMismatch if blocks of ``identity`` are of another size than ours."""
        if identity.execution.block_size != self.block_size:
            raise IdentityMismatch(
                f"the identity has blocks of {identity.execution.block_size} tokens, "
                f"this cache of {self.block_size}"
            )

    def _attach(self, node: Node, key: bytes, ids: BlockIds) -> Node:
        """Let the path to ``node`` go on with ``key``, which none of its children begins with."""
        stride = self.stride
        if node.order is not None and node.order.num_short:
            before = node.order.around(key[:stride])[0]
            if before is not None and len(before) < stride and key.startswith(before):
                assert node.children is not None
                tail = node.children[before]  # ``key`` contains it
                self._forget(tail.blocks[0])
                self.leaves.discard(tail)
                tail.unlink(stride)
                self.num_nodes -= 1
        self.pool.counts[ids] += 1
        self.cached[ids] = True
        self.num_blocks += len(ids)
        self.num_published += len(ids)
        self.version += 1
        grows = node.blocks and not node.children and len(key) >= stride
        if grows and len(node.key) + len(key) <= MAX_EDGE_BYTES:
            node.children = node.order = None  # a superseded tail may have left them empty
            if not node.entry:
                self.leaves.discard(node)  # parked, or no leaf until its tail went
                self.leaves.add_held(node)
            node.key += key
            node.blocks.frombytes(ids.tobytes())
        else:
            if node.blocks and not node.children:
                self.leaves.discard(node)
            blocks = array("q")
            blocks.frombytes(ids.tobytes())
            step = max(MAX_EDGE_BYTES // stride, 1)
            for at in range(0, len(blocks), step):
                part = Node(key[at * stride : (at + step) * stride], blocks[at : at + step], node)
                node.adopt(part, stride)
                node = part
                self.num_nodes += 1
            self.leaves.add_held(node)
        return node

    def _deduplicate(self, own: BlockIds, resident: BlockIds) -> bool:
        """Point ``own`` at ``resident``, whose tokens are equal; return whether it was not yet."""
        differ = own != resident
        if not differ.any():
            return False
        duplicates = own[differ]
        kept = resident[differ]
        self.hold(kept)
        own[:] = resident
        self.release(duplicates, 0)
        self.num_deduplicated += len(kept)
        return True

    # -- shrinking ---------------------------------------------------------------------------------

    def take(self, out: BlockIds) -> None:
        """Fill ``out`` with blocks of one reference each: free ones, then evicted ones.

        The caller has seen to it that there are enough.
        """
        n = len(out)
        free = self.pool.free
        filled = free if free < n else n
        if filled > _FEW:
            out[:filled] = self.pool.take(filled)
        else:
            for i in range(filled):
                out[i] = self.pool.take_one()
        if filled < n:
            self._evict_into(out, filled)

    def take_one(self) -> int:
        """Return one block as ``take`` would."""
        if self.pool.free:
            return self.pool.take_one()
        node = self.leaves.oldest()
        block = node.blocks[-1]
        self.cached[block] = False
        self._cut(node, 1)
        self._count_evicted(1)
        return block

    def evict(self, n: int) -> int:
        """Free up to ``n`` blocks, least recently used first; return how many were freed."""
        ids = np.empty(min(n, self.evictable), np.int64)
        self._evict_into(ids, 0)
        return self.pool.drop(ids)

    def _evict_into(self, out: BlockIds, filled: int) -> None:
        """Fill ``out[filled:]`` with evicted blocks; the tree's reference becomes the caller's.

        Cuts leaves block by block from their ends, least recently used first: O(1) per block,
        O(log leaves) per leaf.
        """
        first, n = filled, len(out)
        oldest, counts, used = self.leaves.oldest, self.pool.counts, self.leaves.used
        while filled < n:
            node = oldest()
            blocks = node.blocks
            size = len(blocks)
            if size > n - filled:
                size = n - filled
            if size > 1:
                # Neither counts nor times rise along a path, so it is enough to look at the other
                # end to know that all may go with the last one.
                end = blocks[-size]
                if counts.item(end) > 1 or used.item(end) != used.item(blocks[-1]):
                    size = self._num_equal(blocks, size)
            ids = out[filled : filled + size]
            ids[:] = blocks[-size:]
            self.cached[ids] = False
            self._cut(node, size)
            filled += size
        self._count_evicted(filled - first)

    def _count_evicted(self, n: int) -> None:
        self.num_blocks -= n
        self.evictable -= n
        self.num_evicted += n
        self.version += 1

    def _num_equal(self, blocks: array[int], most: int) -> int:
        """Return how many of the last ``most`` blocks may go and are as old as the last one."""
        counts, used = self.pool.counts, self.leaves.used
        ids = np.array(blocks[-most:], np.int64)
        return int(np.count_nonzero((counts[ids] == 1) & (used[ids] == used[ids[-1]])))

    def disown(self, block: int) -> bool:
        """Give up ``block``, which one other holds, to its holder; False if paths go on from it.

        For when nothing is evictable: then every leaf is held, and so is every parked one known.
        """
        self.leaves.park_all()  # those that are held and have not come up yet
        node = self.leaves.parked_at(block)
        if node is None:
            return False
        self.leaves.discard(node)
        self._forget(block)
        self._cut(node, 1)
        if node.blocks:
            self.leaves.add_idle(node)
        self.num_evicted += 1
        return True

    def _forget(self, block: int) -> None:
        """Drop the tree's reference to a block; if nobody else holds it, it is free."""
        self.cached[block] = False
        self.num_blocks -= 1
        self.version += 1
        left = self.pool.counts.item(block) - 1
        self.pool.counts[block] = left
        if left == 0:
            self.evictable -= 1
            self.pool.put_back_one(block)

    def _cut(self, node: Node, size: int) -> None:
        """Shorten a leaf by its last ``size`` blocks; an empty one goes for good."""
        keep = len(node.blocks) - size
        if keep:
            del node.blocks[keep:]
            node.key = node.key[: keep * self.stride]
            return
        parent = node.parent
        assert parent is not None
        self.leaves.discard(node)
        node.unlink(self.stride)
        self.num_nodes -= 1
        if not parent.children:
            parent.children = parent.order = None
            if isinstance(parent, Root):
                del self.roots[parent.identity]
            else:
                self.leaves.add_idle(parent)
        elif len(parent.children) == 1 and parent.blocks and parent.join(self.stride):
            self.num_nodes -= 1

    def clear(self) -> int:
        """Forget everything; return how many blocks became free. Nobody may hold any."""
        ids = np.flatnonzero(self.cached)
        freed = self.pool.drop(ids)
        self.roots.clear()
        self.cached[:] = False
        self.leaves = LruLeaves(self.pool)
        self.num_blocks = self.num_nodes = self.evictable = 0
        self.version += 1
        return freed
