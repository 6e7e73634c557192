"""Why the rest of a prompt is not resident: a reason for every token that would be computed.

Knows the tree, what was evicted and identities; nothing of requests. Reads only: it touches no
time, moves no counter, takes no hold. Of other identities it looks at those of the same tenant
alone, and behind a salt at those of the same salt: salts keep the tenant's own users apart, and
none of them may learn what another has asked. Who asks without a salt is the tenant itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from radixkv.identity.identity import CacheIdentity
from radixkv.matching import Match
from radixkv.nodes import Node
from radixkv.runs import Stretch
from radixkv.tokens import TOKEN_BYTES, decode, encode

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

Reason: TypeAlias = Literal[
    "evicted",
    "expired",
    "adapter",
    "template",
    "tokenizer",
    "execution",
    "model",
    "namespace",
    "diverged",
    "first_seen",
    "below_block",
    "last_token",
    "disabled",
]
"""Why tokens are not resident, or not used.

evicted      they were resident, and made room for others or went in a reset
expired      the same, after a pin that had kept them ran out
adapter .. namespace
             resident, but under another identity of the same tenant, which differs in this first
             (``namespace``: another salt, or none; told to those who have none themselves, and by
             ``every_salt``)
diverged     the cache goes on otherwise at this point; see ``divergence``
first_seen   none of the others: no trace of them
below_block  the end of a public prefix, behind its last whole block, that nobody has put in
last_token   resident or not, it has to be computed, because its logits are wanted
disabled     the cache is off, told to miss, or was not to be read beyond this
"""

_OF_FIELD: tuple[tuple[str, Reason], ...] = (
    ("model", "model"),
    ("tokenizer", "tokenizer"),
    ("template", "template"),
    ("adapter", "adapter"),
    ("execution", "execution"),
    ("version", "execution"),
    ("namespace", "namespace"),
)
_MAX_OTHERS = 256  # identities of the tenant that are asked
_MAX_SIBLINGS = 16  # children that are asked whether they are what the prompt diverged from


@dataclass(frozen=True, slots=True)
class Explanation:
    """What of a prompt is resident, and why the rest is not."""

    num_tokens: int
    resident_tokens: int
    """What ``acquire`` would give, now."""
    reasons: tuple[tuple[str, int], ...]
    """Reasons and the number of tokens each is for, in the order of the prompt; they sum to
    ``num_tokens - resident_tokens``."""
    divergence: int | None = None
    """Index of the first token for which the cache, under this identity, has another one; None if
    no path goes on there, or nothing is shared at all."""
    sibling_tokens: tuple[int, ...] = ()
    """What the cache has from ``divergence`` on; of several, what came last."""
    other: tuple[str, ...] = ()
    """Dotted names of the fields in which the other identity differs, whose the tokens are; empty
    if none of the reasons says so."""
    evicted_s: float | None = None
    """Seconds since the first tokens behind the resident ones were evicted; None if they were not,
    or nobody knows when."""


def explain(
    cache: PrefixCache,
    identity: CacheIdentity,
    tokens: bytes,
    *,
    max_cached: int | None = None,
    context: int = 64,
    every_salt: bool = False,
) -> Explanation:
    """Explain what ``acquire`` would find of ``tokens`` and what it would not.

    ``context`` bounds ``sibling_tokens``. ``every_salt``: behind a salt too, tell what is resident
    under others of the tenant, as to an admin. O(look-ups under up to 256 identities of the tenant,
    and places at which anything of the tenant was evicted). Raises IdentityMismatch as ``acquire``
    does.
    """
    if type(tokens) is not bytes:
        tokens = encode(tokens)
    num_tokens = len(tokens) // TOKEN_BYTES
    resident = cache.lookup(identity, tokens, max_cached=max_cached)
    if not cache.enabled or cache.force_miss:
        return Explanation(num_tokens, resident, _account([("disabled", num_tokens)], resident))
    match, known, _ = cache._match(identity, tokens, num_tokens)
    divergence, sibling = _divergence(cache, identity, tokens, match, known, context)
    # Reasons, and the tokens at which what each is for ends.
    ends: list[tuple[Reason, int]] = [("disabled", known)]
    when = None
    for stretch in _evicted(cache, identity, tokens, known):
        when = stretch.when if when is None else when
        expired = cache.pins.expired_to(identity, tokens, stretch.when)
        ends.append(("expired", min(expired, stretch.end)))
        ends.append(("evicted", stretch.end))
        known = stretch.end
    border = cache._public.of(identity, tokens)
    if border and 0 < border.num_whole * cache.block_size == known < border.num_tokens:
        ends.append(("below_block", border.num_tokens))
        known = border.num_tokens
    length, differing = _elsewhere(cache, identity, tokens, every_salt)
    if known < length and length - known >= min(cache.block_size, num_tokens - 1 - known):
        ends.append((_reason(differing), length))
        known = length
    else:
        differing = ()
    new: Reason = "diverged" if divergence is not None and len(ends) == 1 else "first_seen"
    if known < num_tokens:
        ends.append((new, num_tokens))
    elif max_cached is None or max_cached < num_tokens:
        ends = [(reason, min(end, num_tokens - 1)) for reason, end in ends]
        ends.append(("last_token", num_tokens))
    reasons = _account(ends, resident)
    ago = None if when is None else cache.residency.seconds_since(when)
    return Explanation(num_tokens, resident, reasons, divergence, sibling, differing, ago)


def _account(ends: list[tuple[Reason, int]], start: int) -> tuple[tuple[str, int], ...]:
    """Return how many tokens each reason is for, given where they end and the first begins."""
    out: list[tuple[str, int]] = []
    for reason, end in ends:
        if end <= start:
            continue
        if out and out[-1][0] == reason:
            out[-1] = (reason, out[-1][1] + end - start)
        else:
            out.append((reason, end - start))
        start = end
    return tuple(out)


def _evicted(
    cache: PrefixCache, identity: CacheIdentity, tokens: bytes, known: int
) -> list[Stretch]:
    """Return what of ``tokens`` follows on the first ``known`` and was evicted."""
    border = cache._public.of(identity, tokens)
    found = []
    if border is not None and known < border.num_tokens:
        found = cache.ghosts.find(border.identity, border.tokens, known)
        known = found[-1].end if found else known
    return [*found, *cache.ghosts.find(identity, tokens, known)]


def _divergence(
    cache: PrefixCache,
    identity: CacheIdentity,
    tokens: bytes,
    match: Match,
    known: int,
    context: int,
) -> tuple[int | None, tuple[int, ...]]:
    """Return where our own paths go on with other tokens than ours, and with which."""
    _, num_whole, source, _, node = match
    stride, at = cache.tree.stride, known * TOKEN_BYTES
    if node is None or at == len(tokens):
        return None, ()
    node = node.at(num_whole + (source is not None))
    if node.root.identity != identity:
        # All that was found is public: only what is behind its border is ours.
        border = cache._public.of(identity, tokens)
        mount = None if border is None else border.mounts.get(identity)
        if border is None or mount is None or known != border.num_tokens:
            return None, ()
        node = _newest(mount, tokens[num_whole * stride : at])
        if node is None:
            return None, ()
    elif source is not None and node.start == num_whole:
        # The one that was found shares most, but others may share as much.
        assert node.parent is not None
        node = _newest(node.parent, tokens[num_whole * stride : at]) or node
    rest = node.key[at - node.start * stride :]
    while len(rest) < context * TOKEN_BYTES:
        child = _newest(node, b"")
        if child is None:
            break
        node, rest = child, rest + child.key
    if not rest:
        return None, ()
    return known, tuple(decode(rest[: context * TOKEN_BYTES]))


def _newest(node: Node, begin: bytes) -> Node | None:
    """Return the child that came last of those whose first block begins with ``begin``."""
    for key in islice(reversed(node.children or {}), _MAX_SIBLINGS):
        if key.startswith(begin):
            return (node.children or {})[key]
    return None


def _elsewhere(
    cache: PrefixCache, identity: CacheIdentity, tokens: bytes, every_salt: bool
) -> tuple[int, tuple[str, ...]]:
    """Return how much is resident under another identity of the tenant, and what differs in it."""
    best: int = 0
    differing: tuple[str, ...] = ()
    for other in _others(cache, identity, every_salt):
        _, length, _ = cache._match(other, tokens, len(tokens) // TOKEN_BYTES)
        if length and length >= best:
            fields = identity.difference(other)
            if length > best or len(fields) < len(differing):
                best, differing = length, fields
    return best, differing


def _others(
    cache: PrefixCache, identity: CacheIdentity, every_salt: bool
) -> Iterable[CacheIdentity]:
    """Return other identities under which anything is resident and that may be told of."""
    mine = identity.namespace
    if mine.tenant not in cache.accounts:
        return ()
    told = (
        root.identity
        for root in cache.accounts.of(mine.tenant).roots
        if every_salt or mine.salt is None or root.identity.namespace == mine
    )
    return {*islice(told, _MAX_OTHERS)} - {identity}


def _reason(differing: tuple[str, ...]) -> Reason:
    """Return the reason that the first of the fields in which two identities differ stands for."""
    names = {name.partition(".")[0] for name in differing}
    return next(reason for name, reason in _OF_FIELD if name in names)
