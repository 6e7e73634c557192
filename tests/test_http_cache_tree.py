"""GET /v1/cache/tree: sums that add up, and nobody else's text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import Keys, bearer, open_gate

TEXT = "the user is in the system and the assistant is to answer. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        for tail in ("hello", "and you", "the system"):
            complete(server, TEXT + tail)
        server.wait_until(server.at_rest)
        yield server


def complete(server: RunningServer, prompt: str, headers: dict[str, str] | None = None) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    status, _, reply = server.ask("POST", "/v1/completions", body, headers=headers or {})
    assert status == 200, reply


def tree(server: RunningServer, query: str = "", headers: dict[str, str] | None = None) -> Any:
    status, _, reply = server.ask("GET", f"/v1/cache/tree{query}", headers=headers or {})
    assert status == 200, reply
    return reply


def test_nodes_come_after_their_parents_and_add_up(server: RunningServer) -> None:
    reply = tree(server, "?text=true")
    nodes = reply["nodes"]
    stats = server.ask("GET", "/v1/cache/stats")[2]
    assert reply["complete"] and reply["scope"] == "server"
    assert sum(node["blocks"] for node in nodes) == stats["blocks"]["resident"]
    for place, node in enumerate(nodes):
        assert node["id"] == place
        if node["parent"] is None:
            assert node["kind"] == "root"
        else:
            parent = nodes[node["parent"]]
            assert node["parent"] < place
            assert node["start"] == parent["start"] + parent["tokens"]
        children = [other for other in nodes if other["parent"] == place]
        assert node["subtree_tokens"] == node["tokens"] + sum(c["subtree_tokens"] for c in children)
    texts = [node["text"] for node in nodes if node["start"] == 0 and node["kind"] == "node"]
    assert any(text.startswith("the user is in the system") for text in texts)


def test_what_is_left_out_is_summed_up(server: RunningServer) -> None:
    whole, part = tree(server), tree(server, "?limit=2")
    assert len(part["nodes"]) < len(whole["nodes"])
    assert any(node["kind"] == "other" for node in part["nodes"])
    assert sum(n["tokens"] for n in part["nodes"]) == sum(n["tokens"] for n in whole["nodes"])
    flat = tree(server, "?depth=0")
    assert {node["kind"] for node in flat["nodes"]} == {"root", "other"}


def test_text_is_shown_only_if_asked_for(server: RunningServer) -> None:
    assert all(node["text"] is None for node in tree(server)["nodes"])


@pytest.mark.parametrize(
    "query", ["?depth=-1", "?limit=0", "?limit=1000000", "?text=yes", "?x=1", "?depth=1&depth=2"]
)
def test_a_bad_query_is_a_400(server: RunningServer, query: str) -> None:
    assert server.ask("GET", f"/v1/cache/tree{query}")[0] == 400


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Keys]]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    gate, keys = open_gate(folder, alice={}, bob={}, root={"role": "admin"})
    with running_server(gate=gate) as server:
        complete(server, "alice has a secret. " * 4, bearer(keys["alice"]))
        complete(server, "bob has none. " * 4, bearer(keys["bob"]))
        server.wait_until(server.at_rest)
        yield server, keys


def test_a_tenant_sees_its_own_tree_and_an_admin_all_without_text(
    shared: tuple[RunningServer, Keys],
) -> None:
    """SECURITY-5."""
    server, keys = shared
    bob = tree(server, "?text=true", bearer(keys["bob"]))
    assert {node["tenant"] for node in bob["nodes"]} == {"bob"}
    assert "bob has none" in str(bob) and "secret" not in str(bob) and bob["scope"] == "tenant"
    root = tree(server, "?text=true", bearer(keys["root"]))
    assert {node["tenant"] for node in root["nodes"]} >= {"alice", "bob"}
    assert all(node["text"] is None for node in root["nodes"])
    server.serving.inspect_text = True
    try:
        assert "secret" in str(tree(server, "?text=true", bearer(keys["root"])))
        assert "secret" not in str(tree(server, "?text=true", bearer(keys["bob"])))
    finally:
        server.serving.inspect_text = False
