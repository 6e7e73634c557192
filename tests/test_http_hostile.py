"""Clients that mean harm, or do it anyway: nothing they send takes the service from the others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from radixkv.errors import Overloaded
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.stream import Stream
from radixkv.service.http.body import MAX_NESTING
from radixkv.service.http.cache_events import LISTENERS
from radixkv.service.http.fields import MAX_STOP_CHARS
from tests.hostile_client import come_to_rest
from tests.http_server import WAIT_S, RunningServer, running_server
from tests.leak_harness import held
from tests.tenant_files import bearer, open_gate

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LONG: dict[str, Any] = {"prompt": [5] * 40, "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(max_model_len=256, kv_memory="1MiB") as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_stays(server: RunningServer) -> Iterator[None]:
    """After each test the server serves, and holds nothing."""
    yield
    assert server.ask("GET", "/health")[0] == 200
    come_to_rest(server, {})


def request_bytes(method: str, path: str, body: object = None, *headers: str) -> bytes:
    """A request as it goes over the wire."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def exchange(server: RunningServer, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        while part := sock.recv(2**16):
            found += part
    return found


LAST = request_bytes("GET", "/health", None, "Connection: close")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", CHAT, "chat_template_kwargs"),
        ("/v1/cache/explain", CHAT, "chat_template_kwargs"),
        ("/v1/messages", CHAT | {"model": "tiny"}, "metadata"),
        ("/tokenize", {"prompt": "hello"}, "unknown"),
    ],
)
def test_what_is_nested_too_deeply_is_refused_at_any_depth(
    server: RunningServer, path: str, body: dict[str, Any], name: str
) -> None:
    """What JSON's parser bears, templates and digests may not: it was a 500 from some depth on."""

    def status(depth: int) -> int:
        value: Any = {"a": None}
        for _ in range(depth - 2):  # the body itself is one
            value = {"a": value} if depth % 2 else {"a": [value][0]}
        return server.ask("POST", path, body | {name: value})[0]

    assert status(MAX_NESTING) == 200
    for depth in (MAX_NESTING + 1, 300, 900):
        assert status(depth) == 400


def test_many_arrays_that_are_not_deep_are_fine(server: RunningServer) -> None:
    body = {"prompt": [[5, 6]] * (2 * MAX_NESTING), "max_tokens": 1}
    assert server.ask("POST", "/v1/completions", body)[0] == 200


def test_a_stop_string_is_bounded_in_both_dialects(server: RunningServer) -> None:
    """Tables are made and remembered for it: megabytes of it took gigabytes, and everybody's
    time."""
    for length, wanted in ((MAX_STOP_CHARS, 200), (MAX_STOP_CHARS + 1, 400)):
        stop = ["x" * length]
        assert server.ask("POST", "/v1/chat/completions", CHAT | {"stop": stop})[0] == wanted
        body = CHAT | {"model": "tiny", "stop_sequences": stop}
        assert server.ask("POST", "/v1/messages", body)[0] == wanted


def test_a_head_of_the_events_does_not_hold_its_connection_for_ever(server: RunningServer) -> None:
    answers = exchange(server, request_bytes("HEAD", "/v1/cache/events") + LAST)
    assert answers.startswith(b"HTTP/1.1 405")
    assert answers.count(b"HTTP/1.1 ") == 2


def test_pipelined_requests_are_answered_in_their_order(server: RunningServer) -> None:
    many = [request_bytes("POST", "/tokenize", {"prompt": "the " * i}) for i in range(1, 21)]
    answers = exchange(server, b"".join(many) + LAST).split(b"HTTP/1.1 200 OK")[1:]
    assert len(answers) == 21
    counts = [json.loads(a.partition(b"\r\n\r\n")[2])["count"] for a in answers[:-1]]
    assert counts == sorted(counts) and len(set(counts)) == 20


@pytest.mark.parametrize(
    "data",
    [
        request_bytes("POST", "/v1/completions", LONG),
        request_bytes(
            "POST", "/v1/messages", CHAT | {"model": "tiny", "max_tokens": 200, "stream": True}
        ),
        request_bytes("POST", "/v1/cache/pin", {"tokens": [7] * 200}),
        request_bytes("GET", "/v1/cache/events"),
        request_bytes("POST", "/v1/completions", LONG)[:-9],
    ],
    ids=["completion", "message", "pin", "events", "half a body"],
)
def test_a_socket_that_is_half_closed_counts_as_gone(server: RunningServer, data: bytes) -> None:
    """LEAK-5: and what it asked for ends."""
    exchange(server, data, half_close=True)
    listeners = server.server._runner.app[LISTENERS]
    server.wait_until(lambda: not listeners.of("local"))


@pytest.mark.parametrize(
    "header",
    [
        "X-Long: " + "a" * 10_000,
        "\r\n".join(f"X-{i}: a" for i in range(1000)),
        "Content-Length: -5",
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "X-Request-Id: a\x00b",
        "Transfer-Encoding: gzip, chunked, gzip",
    ],
    ids=["long", "many", "negative", "two lengths", "zero byte", "encodings"],
)
def test_headers_that_are_out_of_bounds_are_a_400_in_json(
    server: RunningServer, header: str
) -> None:
    answer = exchange(server, request_bytes("POST", "/tokenize", None, header) + b"0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "bad_request"


@pytest.mark.parametrize("value", ["Bearer \xff\xfe", "Bearer \xed\xa0\x80", "Basic \xff", ""])
def test_a_key_of_odd_bytes_is_a_wrong_key(tmp_path: Path, value: str) -> None:
    gate, _ = open_gate(tmp_path, root={"role": "admin"})
    with running_server(gate=gate) as keyed:
        for name in ("Authorization", "x-api-key"):
            header = f"{name}: {value}"
            answer = exchange(
                keyed, request_bytes("GET", "/v1/models", None, header, "Connection: close")
            )
            assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/pin", "/v1/cache/prewarm"])
def test_who_leaves_while_waiting_is_never_begun(server: RunningServer, path: str) -> None:
    """LEAK-5: the engine is held until all have gone."""
    body = LONG if path == "/v1/completions" else {"tokens": [9] * 100}
    steps = server.engine._core.counters.steps

    async def come_and_go() -> None:
        async with aiohttp.ClientSession() as session:
            asked = [
                asyncio.create_task(session.post(server.url + path, json=body)) for _ in range(8)
            ]
            while len(server.serving.active) < 8:
                await asyncio.sleep(0.005)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            while server.serving.active:
                await asyncio.sleep(0.005)

    with held(server):
        server.run(come_and_go())
    server.wait_until(server.at_rest)
    assert server.engine._core.counters.steps == steps


def test_an_adapter_that_loads_slowly_keeps_nobody_from_their_answers(
    server: RunningServer,
) -> None:
    """Whoever unloads one waits for the load, and no one else does."""

    async def unload_and_look() -> int:
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/v1/unload_lora_adapter"
            unloading = asyncio.create_task(session.post(url, json={"lora_name": "none"}))
            await asyncio.sleep(0.05)
            async with session.get(f"{server.url}/v1/models") as reply:
                assert reply.status == 200
            assert not unloading.done()
            server.engine.adapters._loading.release()
            async with await unloading as reply:
                return reply.status

    server.engine.adapters._loading.acquire()
    assert server.run(unload_and_look()) == 404


def test_what_a_list_of_prompts_did_not_come_to_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of four is queued, the second finds the queue full: three are not paid for."""
    gate, keys = open_gate(tmp_path, one={"tokens_per_minute": 6000})
    with running_server(gate=gate) as keyed:
        submit, calls = Engine.submit, 0

        def filling(*args: Any, **kwargs: Any) -> Stream:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Overloaded("full")
            return submit(*args, **kwargs)

        monkeypatch.setattr(Engine, "submit", filling)
        body = {"prompt": [[5] * 500] * 4, "max_tokens": 1}
        status, _, reply = keyed.ask("POST", "/v1/completions", body, headers=bearer(keys["one"]))
        assert status == 429, reply
        keyed.wait_until(keyed.at_rest)
        _, headers, _ = keyed.ask(
            "POST", "/tokenize", {"prompt": "the"}, headers=bearer(keys["one"])
        )
        assert 5400 < int(headers["x-ratelimit-remaining-tokens"]) <= 5600


def test_a_tenants_file_that_is_spoiled_under_load_locks_nobody_out(tmp_path: Path) -> None:
    """Whatever the file becomes, who had a key is answered, and so is who gets one later."""
    gate, keys = open_gate(tmp_path, root={"role": "admin"}, one={"cache_floor": "10%"})
    file = tmp_path / "tenants.toml"
    good = file.read_bytes()
    spoiled = [
        b"", b"\xff\xfe", b"[tenants.one", good[: len(good) // 2], b"tenants = 5",
        good.replace(b"10%", b"101%"), good.replace(b"10%", b"90%") + b'\n[tenants.two]\n'
        b'cache_floor = "50%"\n', good + b"\n[tenants.local]\n", b"[" * 5000,
    ]  # fmt: skip
    with running_server(gate=gate, kv_memory="1MiB", max_model_len=256) as keyed:

        async def storm() -> list[int]:
            async def ask(session: aiohttp.ClientSession) -> int:
                async with session.post(
                    f"{keyed.url}/v1/completions",
                    json=LONG | {"max_tokens": 20},
                    headers=bearer(keys["one"]),
                ) as reply:
                    await reply.read()
                    return reply.status

            statuses = []
            async with aiohttp.ClientSession() as session:
                for content in spoiled:
                    asked = [asyncio.create_task(ask(session)) for _ in range(4)]
                    await asyncio.sleep(0.005)
                    file.write_bytes(content)
                    gate.reload()
                    statuses += await asyncio.gather(*asked, ask(session))
                file.unlink()
                gate.reload()
                statuses.append(await ask(session))
                file.write_bytes(good)
                gate.reload()
                statuses.append(await ask(session))
            return statuses

        found = keyed.run(storm())
        assert set(found) == {200}
        come_to_rest(keyed, bearer(keys["root"]))
