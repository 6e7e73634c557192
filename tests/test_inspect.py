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
from radixkv.service.inspect_tree import branches_of
from radixkv.service.inspect_view import Snapshot, render
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
        with pytest.raises(InspectError, match="does not take this key: .*API key"):
            shown(CacheClient(server.url, api_key="rk-00000000-of-nobody"))


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


def shown_nodes(
    server: RunningServer, nodes: list[dict[str, Any]], *, width: int = 120, **options: Any
) -> str:
    stats = server.ask("GET", "/v1/cache/stats?window=1m")[2]
    out = io.StringIO()
    snapshot = Snapshot(stats, {"nodes": nodes, "complete": True})
    drawn = render(snapshot, **({"ascii_only": True, "width": width} | options))
    Console(file=out, width=width).print(drawn)
    return out.getvalue()


def test_ten_thousand_nodes_are_drawn_in_few_lines(server: RunningServer) -> None:
    nodes = [node(0, None, 0, subtree_tokens=160_000, subtree_nodes=10_001)]
    nodes += [node(i, 0, 16) for i in range(1, 10_001)]
    assert len(shown_nodes(server, nodes).splitlines()) < 60


def test_of_a_bushy_tree_the_widest_branches_are_drawn_and_the_rest_is_summed_up(
    server: RunningServer,
) -> None:
    nodes = [node(0, None, 0, subtree_nodes=10_001)]
    for i in range(1, 10_001):  # eight below each
        nodes.append(node(i, (i - 1) // 8, 16))
    for i in range(10_000, 0, -1):
        nodes[(i - 1) // 8]["subtree_tokens"] += nodes[i]["subtree_tokens"]
    nodes[8]["tokens"], nodes[8]["subtree_tokens"] = 7777, 150_000
    text = shown_nodes(server, nodes, depth=20, lines=30)
    tree = text[text.index("tree: ") :].splitlines()
    assert 20 < len(tree) <= 32
    assert tree[2].strip().startswith("7,777 tokens"), "the widest comes first"
    assert re.search(r"\.\.\. \d+ nodes, [\d,]+ tokens", text)


def test_a_narrow_terminal_cuts_texts_and_no_numbers(server: RunningServer) -> None:
    nodes = [node(0, None, 0, subtree_nodes=4), node(1, 0, 1_234_567, text="so it begins " * 12)]
    nodes += [node(2, 1, 16), node(3, 1, 16)]
    for width in (80, 200):
        text = shown_nodes(server, nodes, width=width, ascii_only=False)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width and "so it" in text
        (top,) = (line for line in lines if line.count("1,234,567") == 2)
        assert re.search(r"1,234,567 +2 +1,234,567 +0 ", top)
        (row,) = (line for line in lines if line.lstrip().startswith("tenant ") and "rate" in line)
        assert "caused" in row, "all of the columns"


def test_an_admin_is_told_whose_prefixes_and_pins_they_are(tmp_path: Path) -> None:
    gate, keys = open_gate(tmp_path, alice={}, ops={"role": "admin"})
    with running_server(gate=gate) as server:
        for tail in ("one", "two"):
            body = {"prompt": f"alice says {TEXT}{tail}", "max_tokens": 1}
            server.ask("POST", "/v1/completions", body, headers=bearer(keys["alice"]))
        pin = {"prompt": TEXT, "ttl": "1h"}
        assert server.ask("POST", "/v1/cache/pin", pin, headers=bearer(keys["alice"]))[0] == 200
        server.wait_until(lambda: server.engine.stats().num_running == 0)
        text = shown(CacheClient(server.url, api_key=keys["ops"]))
    assert "says" not in text
    for title in ("top prefixes", "pins"):
        table = text[text.index(title) :].split("\n\n")[0]
        assert re.search(r"\btenant\b", table) and "alice" in table


@pytest.mark.parametrize("terminal", [True, False])
def test_a_server_that_goes_away_while_it_is_watched_is_waited_for(
    server: RunningServer, terminal: bool
) -> None:
    class GoesAway(CacheClient):
        looks = 0

        def snapshot(self, **options: Any) -> Snapshot:
            self.looks += 1
            there = self.looks != 2
            return CacheClient.snapshot(self if there else CacheClient("http://[::1]:9"), **options)

    client = GoesAway(server.url)
    text = shown(client, terminal=terminal, watch_s=0.0, rounds=3)
    assert client.looks == 3 and text.count("trying again") == 1
    assert text.rindex("the whole server") > text.index("trying again")
