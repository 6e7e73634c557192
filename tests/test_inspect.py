"""``radixkv inspect``: what it draws in a terminal and in a pipe, what it says if it cannot."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from radixkv.service.cli_inspect import CacheClient, InspectError, show
from radixkv.service.inspect_view import Snapshot, branches_of, render
from tests.http_server import RunningServer, running_server
from tests.tenant_files import bearer, open_gate

TEXT = "the user is in the system and the assistant is to answer. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(kv_memory="320KiB", max_model_len=512) as server:
        for tail in ("hello", "and you", "the system", "[red]\x1b[31mtricks"):
            body = {"prompt": TEXT + tail, "max_tokens": 2, "temperature": 0}
            assert server.ask("POST", "/v1/completions", body)[0] == 200
        server.wait_until(server.at_rest)
        yield server


def shown(client: CacheClient, *, terminal: bool = False, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
    show(client, console=console, **options)
    return out.getvalue()


def test_a_pipe_gets_plain_text_with_all_that_matters(server: RunningServer) -> None:
    text = shown(CacheClient(server.url + "/v1"))
    assert "\x1b" not in text and text.isascii()
    assert "tiny: the whole server, blocks of 16 tokens" in text
    assert re.search(r"\[[#=.]{40}\] 0 in use, \d+ cached, \d+ free of \d+ blocks", text)
    assert re.search(r"local +4 +[\d,]+ +[\d,]+ +\d+\.\d %", text), "hit rates by tenant"
    assert "top prefixes" in text and "the user is in the system" in text
    assert re.search(r"tree: [\d,]+ tokens in \d+ nodes", text)
    assert "waste:" in text


def test_a_terminal_gets_colours_and_frames(server: RunningServer) -> None:
    text = shown(CacheClient(server.url), terminal=True)
    assert "\x1b[" in text and "├──" in text and "▒" in text
    assert "\x1b[31mtricks" not in text, "a prompt does not steer the terminal"
    assert "[red]" in text, "nor the markup"


def test_watching_shows_it_again(server: RunningServer) -> None:
    client = CacheClient(server.url)
    assert shown(client, watch_s=0.0, rounds=3).count("the whole server") == 3
    assert "tiny" in shown(client, terminal=True, watch_s=0.0, rounds=2)


def test_a_tenant_sees_its_own_part(tmp_path: Path) -> None:
    gate, keys = open_gate(tmp_path, alice={}, bob={})
    with running_server(gate=gate) as server:
        for who in ("alice", "bob"):
            body = {"prompt": f"{who} says {TEXT}", "max_tokens": 1}
            server.ask("POST", "/v1/completions", body, headers=bearer(keys[who]))
        server.wait_until(server.at_rest)
        text = shown(CacheClient(server.url, api_key=keys["bob"]))
        assert "tenant bob" in text and "bob says" in text and "alice" not in text
        with pytest.raises(InspectError, match="--api-key or in RADIXKV_API_KEY"):
            shown(CacheClient(server.url))


def test_no_server_is_said_in_one_sentence_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "radixkv", "inspect", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "no server answers at http://127.0.0.1:9" in done.stderr
    assert "radixkv serve" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("body", [b"<html>", b'{"error": 1}', b"[]"])
def test_another_kind_of_server_is_said_to_be_one(body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    other = HTTPServer(("127.0.0.1", 0), Other)
    thread = Thread(target=other.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.raises(InspectError, match="does not answer like a radixkv server"):
            shown(CacheClient(f"http://127.0.0.1:{other.server_port}"))
    finally:
        other.shutdown()
        other.server_close()
        thread.join()


def test_a_bad_window_is_the_servers_to_explain(server: RunningServer) -> None:
    with pytest.raises(InspectError, match="window is"):
        shown(CacheClient(server.url), window="5x")


def node(id: int, parent: int | None, tokens: int, **more: Any) -> dict[str, Any]:
    plain = {
        "id": id, "parent": parent, "kind": "node" if parent is not None else "root",
        "tenant": "t", "identity": "ab" * 16, "start": 0, "tokens": tokens, "blocks": 1,
        "references": 0, "idle_s": None, "subtree_tokens": tokens, "subtree_nodes": 1,
        "subtree_blocks": 1, "text": None,
    }  # fmt: skip
    return plain | more


def test_paths_are_counted_through_what_was_left_out() -> None:
    nodes = [node(0, None, 0), node(1, 0, 64), node(2, 1, 16), node(3, 1, 16)]
    nodes.append(node(4, 1, 90, kind="other", subtree_nodes=5))
    (top,) = branches_of(nodes)
    assert (top.paths, top.children[0].paths) == (7, 7)
    assert top.children[0].children[-1].node["kind"] == "other", "drawn last"


def test_ten_thousand_nodes_are_drawn_in_few_lines(server: RunningServer) -> None:
    stats = server.ask("GET", "/v1/cache/stats?window=1m")[2]
    nodes = [node(0, None, 0, subtree_tokens=160_000, subtree_nodes=10_001)]
    nodes += [node(i, 0, 16) for i in range(1, 10_001)]
    out = io.StringIO()
    snapshot = Snapshot(stats, {"nodes": nodes, "complete": True})
    Console(file=out, width=120).print(render(snapshot, ascii_only=True))
    assert len(out.getvalue().splitlines()) < 60
