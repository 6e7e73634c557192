"""The radix tree: which blocks hold the KV of which token paths, and which of the paths are in use.

Knows token bytes, block ids and holds, one root per identity, and one more for each public prefix
that it goes on from; nothing of sequences, requests or tensors. How paths enter it is in
growing.py, how they leave it in shrinking.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.accounts import Accounts, Terms
from radixkv.blocks import BlockIds, BlockPool
from radixkv.errors import IdentityMismatch
from radixkv.identity.identity import CacheIdentity
from radixkv.matching import NOTHING, Match, match
from radixkv.nodes import UNUSED, Node, Root
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.public import PublicPrefix


class RadixTree:
    """Paths of tokens and the blocks that hold their KV; owns the one reference to each block.

    Who uses a path holds it to some depth, and so all that comes before: a hold locks the node it
    ends on, and a node that is locked locks its parent. It is O(nodes above that were not locked).

    Invariants: a block is in the tree once, and nowhere else; a locked node's parent is locked;
    ``evictable`` blocks are those that no hold reaches, and each can be evicted, last first. Each
    root's account has its part of the sums: those of all accounts together are the tree's.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.stride = block_size * TOKEN_BYTES  # bytes of a whole block's tokens
        self.roots: dict[CacheIdentity, Root] = {}
        self.many = False  # there are several accounts, or one with a share: keep their numbers
        self.clock = 1
        self.num_blocks = 0
        self.num_mounts = 0
        self.num_nodes = 0
        self.num_unfilled = 0  # places for tokens in the blocks of tails that hold none
        self.evictable = 0
        # Called with a leaf just before blocks of it are evicted, if it is not as the last cut left
        # it; ``cut`` is the key of that one, and ``cut_when`` the clock at its last cut.
        self.on_evict: Callable[[Node], None] | None = None
        self.cut = b""
        self.cut_when = 0
        # Called once, and then forgotten: with the tokens and blocks that enter next.
        self.look_at_published: Callable[[bytes, BlockIds], None] | None = None
        # Called with a leaf from which blocks are evicted and how many of them stay.
        self.look_at_evicted: Callable[[Node, int], None] | None = None
        # Held tails that were taken out since their holders looked last; None: nobody looks.
        self.orphans: list[Node] | None = None
        self.version = 0  # moves with every change of what a look-up may answer
        self.num_published = self.num_deduplicated = self.num_evicted = 0  # blocks, ever
        self.accounts = Accounts(self)

    def match(self, identity: CacheIdentity, tokens: bytes, limit: int) -> Match:
        """Return what is resident of ``tokens[:limit]`` (bytes); NOTHING if nothing can be."""
        root = self.roots.get(identity)
        return NOTHING if root is None else match(root, tokens, limit, self.stride)

    def root(self, identity: CacheIdentity) -> Root:
        """Return the root of ``identity``, made if need be."""
        root = self.roots.get(identity)
        if root is None:
            self.expect(identity)
            account = self.accounts.of(identity.namespace.tenant)
            root = self.roots[identity] = Root(identity, account)
            account.roots.add(root)
        return root

    def expect(self, identity: CacheIdentity) -> None:
        """Raise IdentityMismatch if blocks of ``identity`` are of another size than ours."""
        if identity.execution.block_size != self.block_size:
            raise IdentityMismatch(
                f"the identity has blocks of {identity.execution.block_size} tokens, "
                f"this cache of {self.block_size}"
            )

    # -- holding -----------------------------------------------------------------------------------

    def hold(self, node: Node, depth: int) -> Node:
        """Hold the path that ends at ``depth`` (not 0), on the edge of ``node`` or above.

        Returns the node on whose edge it ends.
        """
        while depth <= node.start:
            assert node.parent is not None
            node = node.parent
        end, size, taken = node, len(node.blocks), 0
        if depth - node.start < size:
            held = node.num_held() if node.locks else 0
            if node.ends is None:
                node.ends = {depth: 1}
            else:
                node.ends[depth] = node.ends.get(depth, 0) + 1
            if depth - node.start > held:
                taken = depth - node.start - held
        elif node.ends is not None:
            taken = size - node.num_held()
        elif not node.locks:
            taken = size
        node.locks += 1
        while node.locks == 1:  # it was not locked before
            node = node.parent  # type: ignore[assignment]
            if not node.blocks:  # the root
                if node.root.border is not None:
                    self._lock(node.root)
                break
            if node.ends is not None:
                taken += len(node.blocks) - node.num_held()
            elif not node.locks:
                taken += len(node.blocks)
            node.locks += 1
        if taken:
            self.evictable -= taken
            if self.many:
                account = node.root.account
                account.evictable -= taken
                if account.bounded:
                    self.accounts.note(account)
        return end

    def release(self, node: Node, depth: int) -> None:
        """Let go the path that ends at ``depth``, and note that it was in use until now."""
        self.clock += 1
        while depth <= node.start:
            node = node.parent  # type: ignore[assignment]
        if node.key and depth == node.start + len(node.blocks):
            node.used, node.steps = self.clock, None
        elif node.key:
            node.touch(depth, self.clock)
        elif node.start:  # a tail that was superseded: it is not there to tell
            node.above().touch(node.start, self.clock)
        self.let_go(node, depth)

    def release_as(self, node: Node, depth: int, terms: Terms) -> None:
        """As ``release``, of batch work or of what may lie behind a public prefix.

        What batch work had is still older than all that interactive work has used. What comes
        before a mount was used later than what is behind it, so that it goes after that.
        """
        self.clock += 1
        now = self.clock + UNUSED if terms.batch else self.clock
        node = node.at(depth)
        if node.key:
            node.touch_by_any(depth, now)
        elif node.start:
            node.above().touch_by_any(node.start, now)
        root = node.root
        if root.start:
            assert root.parent is not None
            self.clock += 1
            root.parent.at(root.start).touch_by_any(root.start, now + 1)
        self.let_go(node, depth)

    def let_go(self, node: Node, depth: int) -> None:
        """Take back a hold that ends at ``depth`` on the edge of ``node``."""
        last = node
        while node.key:
            if node.ends is not None:
                if self._let_go_inside(node, depth):
                    break
            else:
                node.locks -= 1
                if node.locks:
                    break
                self.evictable += len(node.blocks)
                if self.many:
                    account = node.root.account
                    account.evictable += len(node.blocks)
                    if account.bounded:
                        self.accounts.note(account)
                if node.children is None and not node.entry:
                    node.root.account.leaves.add(node)
            depth = node.start
            node = node.parent  # type: ignore[assignment]
        else:
            if node.blocks:
                self._let_go_superseded(node)
            elif node.root.border is not None:
                self._unlock(node.root)
        # Two nodes are kept apart for a hold that ends between them, or for a sibling.
        if last.children is not None and len(last.children) == 1 and last.blocks:
            self.num_nodes -= last.join(self.stride)

    def _let_go_inside(self, node: Node, depth: int) -> bool:
        """Do so on an edge that is held to more than one depth; tell whether it is locked yet."""
        if node.locks == 1:
            node.locks, node.ends = 0, None
            held, left = depth - node.start, 0
        else:
            held, ends = node.num_held(), node.ends
            if ends is not None and depth in ends:
                ends[depth] -= 1
                if not ends[depth]:
                    del ends[depth]
                    node.ends = ends or None
            node.locks -= 1
            left = node.num_held()
        if left < len(node.blocks) and node.children is None and not node.entry:
            node.root.account.leaves.add(node)
        self.evictable += held - left
        if self.many:
            self.accounts.count_evictable(node.root.account, held - left)
        return node.locks > 0

    def _let_go_superseded(self, tail: Node) -> None:
        """Free a tail that was taken out while held, when the last hold goes, and what it held."""
        tail.locks -= 1
        if not tail.locks:
            self.pool.drop(tail.blocks)
            if tail.start:
                self.let_go(tail.above(), tail.start)

    # -- mounts ------------------------------------------------------------------------------------

    def mount(self, identity: CacheIdentity, border: PublicPrefix) -> Root:
        """Return the mount of ``identity`` behind ``border``, made if need be."""
        mount = border.mounts.get(identity)
        if mount is None:
            self.expect(identity)
            account = self.accounts.of(identity.namespace.tenant)
            mount = border.mounts[identity] = Root(identity, account, border)
            account.roots.add(mount)
            self.num_mounts += 1
        return mount

    def _lock(self, mount: Root) -> None:
        """Count one child more that is held; with the first, hold what comes before the mount."""
        mount.locks += 1
        if mount.locks == 1 and mount.start:
            border = mount.border
            assert border is not None
            # Whoever holds what is behind has found it through this, just now.
            before = match(
                self.roots[border.identity], border.tokens, mount.start * self.stride, self.stride
            )[4]
            assert before is not None
            mount.parent = self.hold(before, mount.start)

    def _unlock(self, mount: Root) -> None:
        """Count one child less that is held; with the last, let go what comes before the mount."""
        mount.locks -= 1
        if not mount.locks and mount.start:
            before, mount.parent = mount.parent, None
            assert before is not None
            self.let_go(before.at(mount.start), mount.start)

    def step_in(self, mount: Root, before: Node | None) -> None:
        """Make a hold of what comes before ``mount`` (named by ``before``) one of a child of it."""
        mount.locks += 1
        if mount.start:
            assert before is not None
            if mount.locks == 1:
                mount.parent = before
            else:
                self.let_go(before.at(mount.start), mount.start)

    def step_out(self, mount: Root) -> Node | None:
        """Make the hold of a child of ``mount`` that goes one of what comes before; name it."""
        before = mount.parent
        mount.locks -= 1
        if before is None:
            return None
        if mount.locks:
            return self.hold(before, mount.start)
        mount.parent = None
        return before

    def clear(self) -> int:
        """Forget everything; return how many blocks became free. Nobody may hold any."""
        for account in self.accounts:
            for root in account.roots:
                if root.border is not None:
                    root.border.mounts.clear()
        self.roots.clear()
        self.num_mounts = 0
        self.accounts.clear()
        self.num_blocks = self.num_nodes = self.num_unfilled = self.evictable = 0
        self.version += 1
        return self.pool.reset()
