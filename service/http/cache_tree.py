"""GET /v1/cache/tree: the radix tree as nodes for drawing, the largest parts in full.

A tenant sees its own paths; an admin sees everybody's, and the text of others' only if the server
was started with --inspect-text.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from typing_extensions import TypedDict

from radixkv.service.http.auth import caller_of
from radixkv.service.http.pace import PACE
from radixkv.service.http.queries import check_names, flag, whole
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply

if TYPE_CHECKING:
    from radixkv.dump import DumpNode
    from radixkv.service.engine.engine import Engine

MAX_NODES = 20_000
MAX_DEPTH = 1000
SHOWN_CHARS = 160
_SHOWN_TOKENS = 48


class TreeNode(TypedDict):
    """A root (`root`), an edge with the node at its end (`node`), or what was left out below a
    parent (`other`).

    `id` is its place in the list, parents come first. `start` tokens come before it. The sums of
    `subtree_*` are of the node and all below it. `references`: running requests and pins that hold
    any of it. `idle_s`: since any of it was in use, 0 if it is now, null if that is unknown.
    `text`: how its edge begins, null where it is not shown.
    """

    id: int
    parent: int | None
    kind: Literal["root", "node", "other"]
    tenant: str | None
    identity: str | None
    start: int
    tokens: int
    blocks: int
    references: int
    idle_s: float | None
    subtree_tokens: int
    subtree_blocks: int
    subtree_nodes: int
    text: str | None


class TreeReply(TypedDict):
    """Nodes of the tree. `complete`: every node was counted somewhere, be it in an `other`."""

    object: Literal["cache.tree"]
    model: str
    block_size: int
    scope: Literal["server", "tenant"]
    complete: bool
    nodes: list[TreeNode]


async def cache_tree(request: web.Request) -> web.Response:
    """Show the tree to ``depth`` levels and about ``limit`` nodes, with text if ``text=true``."""
    check_names(request, ("depth", "limit", "text"))
    depth = whole(request, "depth", 8, least=0, most=MAX_DEPTH)
    limit = whole(request, "limit", 1000, least=1, most=MAX_NODES)
    text = flag(request, "text")
    caller, serving = caller_of(request), request.app[SERVING]
    engine = serving.engine
    seen = None if caller.is_admin else frozenset({caller.tenant})
    readable = None if caller.is_admin and serving.inspect_text else caller.tenant

    def look() -> TreeReply:
        found = engine.cache.tree(
            seen, depth=depth, limit=limit, token_ids=_SHOWN_TOKENS if text else 0
        )
        return {
            "object": "cache.tree",
            "model": engine.model_name,
            "block_size": engine.config.block_size,
            "scope": "server" if seen is None else "tenant",
            "complete": found.complete,
            "nodes": [
                _node(node, _text(engine, node) if readable in (None, node.tenant) else None)
                for node in found.nodes
            ],
        }

    if caller.is_admin:
        return json_reply(await asyncio.to_thread(look))
    async with request.app[PACE].turn(caller.tenant):
        return json_reply(await asyncio.to_thread(look))


def _text(engine: Engine, node: DumpNode) -> str | None:
    if not node.token_ids:
        return None
    return engine.prompting.text_of(node.token_ids)[:SHOWN_CHARS]


def _node(node: DumpNode, text: str | None) -> TreeNode:
    return {
        "id": node.id,
        "parent": node.parent,
        "kind": node.kind,
        "tenant": node.tenant,
        "identity": node.identity,
        "start": node.start,
        "tokens": node.tokens,
        "blocks": node.blocks,
        "references": node.references,
        "idle_s": None if node.idle_s is None else round(node.idle_s, 3),
        "subtree_tokens": node.subtree_tokens,
        "subtree_blocks": node.subtree_blocks,
        "subtree_nodes": node.subtree_nodes,
        "text": text,
    }
