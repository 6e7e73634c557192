"""Prefixes that all tenants share: where a sequence's public part ends and its private one begins.

Knows which token paths were declared public, for which model; nothing of who declared them, or of
how long they stay resident.

A private identity's sequence that begins with a declared prefix keeps the whole blocks of it in the
tree of the public identity, where every tenant finds them, and all that follows below a *mount*, a
root of its own for (identity, prefix):

    public   [p0 p1 p2]           one for all tenants; may end in a tail: the last tokens of the
                                  prefix, where it ends inside a block
    mount    - - - [x3 x4]        tenant a's; its first block begins with those last tokens
    mount    - - - [y3]           tenant b's

So what one tenant finds of another's ends exactly at the border, to the token.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right

from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.matching import NOTHING, Match, match
from radixkv.nodes import Root
from radixkv.tokens import TOKEN_BYTES, encode
from radixkv.tree import RadixTree

_MOST_SEEN = 4096  # identities whose public twin is remembered; salts are for clients to choose


class PublicPrefix:
    """A declared prefix. ``num_whole`` blocks of it are whole, and in the tree of ``identity``."""

    __slots__ = ("identity", "mounts", "num_whole", "outer", "tokens", "withdrawn")

    def __init__(self, identity: CacheIdentity, tokens: bytes) -> None:
        self.identity = identity
        self.tokens = tokens
        self.num_whole = len(tokens) // (TOKEN_BYTES * identity.execution.block_size)
        self.mounts: dict[CacheIdentity, Root] = {}
        self.outer: PublicPrefix | None = None  # the longest other one that it begins with
        self.withdrawn = False

    @property
    def num_tokens(self) -> int:
        """Its length: the border."""
        return len(self.tokens) // TOKEN_BYTES


class PublicPrefixes:
    """All that is declared. To find the longest for a sequence takes one bisection."""

    __slots__ = ("_declared", "_seen", "count")

    def __init__(self) -> None:
        self.count = 0
        self._declared: dict[CacheIdentity, list[PublicPrefix]] = {}  # each sorted by tokens
        self._seen: dict[CacheIdentity, list[PublicPrefix]] = {}  # by private identity

    def declare(self, identity: CacheIdentity, tokens: bytes) -> PublicPrefix:
        """Let all tenants share ``tokens`` under the public ``identity``; the same again is one."""
        if identity.namespace != Namespace.public():
            raise ValueError("a public prefix needs an identity in the public namespace")
        tokens = encode(tokens)
        if not tokens:
            raise ValueError("a public prefix has no tokens; wanted at least one")
        declared = self._declared.get(identity, [])
        for prefix in declared:
            if prefix.tokens == tokens:
                return prefix
        prefix = PublicPrefix(identity, tokens)
        self._set(identity, [*declared, prefix])
        return prefix

    def withdraw(self, prefix: PublicPrefix) -> None:
        """Let nobody who comes from now on find ``prefix`` as public."""
        prefix.withdrawn = True
        declared = self._declared.get(prefix.identity, [])
        self._set(prefix.identity, [other for other in declared if other is not prefix])

    def _set(self, identity: CacheIdentity, declared: list[PublicPrefix]) -> None:
        declared.sort(key=lambda prefix: prefix.tokens)
        around: list[PublicPrefix] = []
        for prefix in declared:
            while around and not prefix.tokens.startswith(around[-1].tokens):
                around.pop()
            prefix.outer = around[-1] if around else None
            around.append(prefix)
        self._declared[identity] = declared
        if not declared:
            del self._declared[identity]
        self._seen.clear()
        self.count = sum(map(len, self._declared.values()))

    def of(self, identity: CacheIdentity, tokens: bytes) -> PublicPrefix | None:
        """Return the longest prefix that ``tokens`` begin with; None for public identities."""
        declared = self._seen.get(identity)
        if declared is None:
            declared = []
            if identity.namespace.tenant is not None:
                twin = dataclasses.replace(identity, namespace=Namespace.public())
                declared = self._declared.get(twin, [])
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[identity] = declared
        at = bisect_right(declared, tokens, key=_tokens_of)
        # Whatever else ``tokens`` begin with, this one begins with it too.
        prefix = declared[at - 1] if at else None
        while prefix is not None and not tokens.startswith(prefix.tokens):
            prefix = prefix.outer
        return prefix

    def all(self) -> tuple[PublicPrefix, ...]:
        """Return every declared prefix."""
        return tuple(prefix for declared in self._declared.values() for prefix in declared)


def _tokens_of(prefix: PublicPrefix) -> bytes:
    return prefix.tokens


def match_beyond(
    tree: RadixTree,
    prefix: PublicPrefix,
    identity: CacheIdentity,
    tokens: bytes,
    limit: int,
    plain: Match,
) -> tuple[Match, PublicPrefix | None]:
    """Return what is resident of ``tokens[:limit]``, which begin with ``prefix``, for ``identity``.

    That is what lies in its own tree (``plain``: from before the prefix was public) if it is more,
    and then None beside it.
    """
    size, stride = tree.block_size, tree.stride
    root = tree.roots.get(prefix.identity)
    found = NOTHING
    if root is not None:
        found = match(root, tokens, min(limit, len(prefix.tokens)), stride)
    mount = prefix.mounts.get(identity)
    if mount is not None and found[1] == prefix.num_whole:
        beyond = match(mount, tokens, limit, stride)
        if beyond[1] * size + beyond[3] > found[1] * size + found[3]:
            found = (found[0] + beyond[0], *beyond[1:])
    if plain[1] * size + plain[3] > found[1] * size + found[3]:
        return plain, None
    return found, prefix
