"""What is true of a cache, the slow way: what is resident, whose KV lies where, what one may find.

Knows nothing of trees beyond how to walk one. It keeps, for each slot of each physical block, the
path of tokens whose KV lies there; so a block that was reused, overwritten or shared wrongly shows
as a path that is not the reader's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.nodes import Node
from radixkv.tokens import decode
from tests.cache_shares import NEVER, Border, Path, Shares, Tenant, Time

GARBAGE: Path = (-1,)

# Who there is: a model and a tenant each, and sometimes a salt. Number 0 of MANY is the public
# identity of the others' model.
Who = tuple[str, Tenant, str | None]
PLAIN: list[Who] = [("model 0", None, None), ("model 1", None, None)]
MANY: list[Who] = [("m", None, None), ("m", "a", None), ("m", "b", None), ("m", "a", "salt")]


class Truth:
    """A cache, its device, and what is known of both."""

    def __init__(self, block_size: int, num_blocks: int, who: Sequence[Who] = PLAIN) -> None:
        self.size = block_size
        self.cache = PrefixCache(num_blocks, block_size)
        self.identities = [
            dataclasses.replace(CacheIdentity.local(model, block_size), namespace=Namespace(*whose))
            for model, *whose in who
        ]
        self.shares = Shares(block_size, {i: tenant for i, (_, tenant, _) in enumerate(who)})
        self.device = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.borders: list[Border] = []  # withdrawn ones too
        self.resident: dict[Path, int] = {}  # path of a block (or tail) -> block, as last seen
        self.published: set[Path] = set()  # every path that anyone has offered
        self.times: dict[Path, Time] = {}  # when each resident block was last let go, and by what
        self.now = 0

    # -- what one may find ---------------------------------------------------------------------

    def longest(self, place: object, tokens: Sequence[int]) -> int:
        """The longest common prefix with any resident path of ``place``."""
        best = 0
        for path in self.resident:
            if path[0] != place:
                continue
            n = 0
            for mine, theirs in zip(tokens, path[1:], strict=False):
                if mine != theirs:
                    break
                n += 1
            best = max(best, n)
        return best

    def border(self, who: int, tokens: Sequence[int]) -> Border | None:
        """The longest declared prefix that ``tokens`` begin with, for a private identity."""
        if self.shares.tenant_of[who] is None:
            return None
        fit = [
            b
            for b in self.borders
            if not b.withdrawn and tuple(tokens[: len(b.tokens)]) == b.tokens
        ]
        return max(fit, key=lambda b: len(b.tokens), default=None)

    def find(self, who: int, tokens: Sequence[int], limit: int) -> tuple[int, Border | None]:
        """What ``who`` may reuse of ``tokens[:limit]``, and the border of what of it is public."""
        own = min(limit, self.longest(who, tokens))
        border = self.border(who, tokens)
        if border is None:
            return own, None
        n = len(border.tokens)
        found = min(limit, self.longest(border.public, tokens[:n]))
        if found >= n - n % self.size:
            found = max(found, min(limit, self.longest((who, border), tokens)))
        return (own, None) if own > found else (found, border)

    def place(self, who: int, border: Border | None, end: int) -> object:
        """In whose tree the block of ``who`` that ends before token ``end`` belongs."""
        if border is None:
            return who
        return border.public if end <= len(border.tokens) else (who, border)

    def kv(self, who: int, border: Border | None, tokens: Sequence[int], at: int) -> Path:
        """What the KV at a position depends on: up to the border on the tokens alone."""
        public = border is not None and at < len(border.tokens)
        return (border.public if border is not None and public else who, *tokens[: at + 1])

    # -- what is there -------------------------------------------------------------------------

    def walk(self) -> dict[Path, int]:
        """Path -> block for all that the tree holds; proves that each holds that path's KV."""
        found: dict[Path, int] = {}
        for root in (root for account in self.cache.accounts for root in account.roots):
            who, border, begun = self.identities.index(root.identity), None, []
            if root.border is not None:
                (border,) = (b for b in self.borders if b.prefix is root.border)
                begun = list(border.tokens[: root.start * self.size])
            place: object = who if border is None else (who, border)
            pending: list[tuple[Node, list[int]]] = [(root, begun)]
            while pending:
                node, before = pending.pop()
                tokens = before + decode(node.key)
                for i, block in enumerate(node.blocks):
                    end = min(len(before) + (i + 1) * self.size, len(tokens))
                    assert (place, *tokens[:end]) not in found
                    found[(place, *tokens[:end])] = block
                    for at in range(len(before) + i * self.size, end):
                        assert self.device[block][at % self.size] == self.kv(
                            who, border, tokens, at
                        )
                pending += [(child, tokens) for child in (node.children or {}).values()]
        return found

    def look(self) -> dict[Path, int]:
        """See what is resident now; return what is not any more."""
        found = self.walk()
        assert set(found) <= self.published, "the tree holds what nobody published"
        gone = {path: block for path, block in self.resident.items() if path not in found}
        self.resident = found
        for path in gone:
            self.times.pop(path, None)
        return gone

    def is_covered(self, path: Path) -> bool:
        """Whether ``path`` or what goes on from it is resident."""
        return any(other[: len(path)] == path for other in self.resident)

    def let_go(self, blocks: Iterable[int], batch: bool) -> None:
        """Somebody has had ``blocks`` until now."""
        self.now += 1
        used, now = {*blocks}, (0 if batch else 1, self.now)
        for path, block in self.resident.items():
            if block in used:
                self.times[path] = max(self.times.get(path, NEVER), now)
