"""Whatever goes wrong, the answer is JSON in OpenAI's shape, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import TypeAdapter

from radixkv.service.http.errors import ErrorReply
from radixkv.service.http.server import HttpServer, bind, run_server, url_of
from radixkv.service.http.serving import Serving
from tests.http_server import RunningServer, running_server

HI: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(max_body=64 * 1024, kv_memory="1MiB", max_model_len=256) as server:
        yield server


def error_of(answer: tuple[int, dict[str, str], Any], status: int) -> dict[str, Any]:
    """Check shape and status; return the error."""
    got, headers, body = answer
    assert got == status, body
    assert TypeAdapter(ErrorReply).validate_python(body, strict=True) == body
    assert headers["X-Request-ID"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        (CHAT, "messages", [{"role": "user", "content": "hello " * 300}]),
        ("/v1/completions", "prompt", [5] * 300),
    ],
)
def test_a_prompt_beyond_the_context_is_a_400_that_clients_recognise(
    server: RunningServer, path: str, field: str, prompt: Any, stream: bool
) -> None:
    """ERRORS-1"""
    error = error_of(server.ask("POST", path, {field: prompt, "stream": stream}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == field
    assert "maximum context length is 256 tokens" in error["message"]


def test_text_that_can_never_fit_is_refused_before_it_is_tokenized(server: RunningServer) -> None:
    """ERRORS-1: also when it is so long that tokenizing it would take seconds."""
    text = "x" * 50_000
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": ["fine", text]}),
    ):
        error = error_of(server.ask("POST", path, body), 400)
        assert error["code"] == "context_length_exceeded"


def test_more_answer_than_the_context_holds_is_refused_too(server: RunningServer) -> None:
    """ERRORS-1"""
    body = {"prompt": [5] * 100, "max_tokens": 200}
    error = error_of(server.ask("POST", "/v1/completions", body), 400)
    assert error["code"] == "context_length_exceeded"


def test_refused_requests_hold_nothing(server: RunningServer) -> None:
    """LEAK-6: two hundred that are too long, mixed with good ones."""

    async def storm() -> list[int]:
        loop = asyncio.get_running_loop()

        def one(i: int) -> int:
            tokens = [5] * (300 if i % 10 else 20)
            body = {"prompt": tokens, "max_tokens": 2}
            return server.ask("POST", "/v1/completions", body)[0]

        return list(await asyncio.gather(*(loop.run_in_executor(None, one, i) for i in range(200))))

    statuses = asyncio.run(storm())
    assert statuses.count(400) == 180 and statuses.count(200) == 20
    server.wait_until(server.at_rest)
    assert server.engine.check() == []


def test_an_unknown_route_and_a_wrong_method_are_json(server: RunningServer) -> None:
    error = error_of(server.ask("GET", "/v2/everything"), 404)
    assert error["code"] == "not_found"
    assert error["message"].startswith("There is no route GET /v2/everything; GET /openapi.json")
    answer = server.ask("GET", CHAT)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer[1]["Allow"] == "POST"


def test_whoever_forgot_the_version_is_told_the_route_that_was_meant(server: RunningServer) -> None:
    for method, path in (("POST", "/chat/completions"), ("GET", "/models"), ("POST", "/messages")):
        error = error_of(server.ask(method, path, {"messages": HI}), 404)
        assert error["message"] == (
            f"There is no route {method} {path}; did you mean /v1{path} (base_url ends in /v1)?"
        )
    for method, path in (("GET", "/chat/completions"), ("POST", "/x"), ("GET", "/" + "y" * 3000)):
        error = error_of(server.ask(method, path), 404)
        assert "did you mean" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"secret" * 2000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n6\r\nsecret\r\nsecret\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret",
    ],
)
def test_what_is_no_http_is_a_400_in_json_and_stays_out_of_the_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(sent)
        head, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    reply = json.loads(body)
    assert TypeAdapter(ErrorReply).validate_python(reply, strict=True) == reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("expect", "status"), [("tea", 417), ("100-continue", 200)])
def test_an_expectation_is_met_or_refused_in_json(
    server: RunningServer, expect: str, status: int
) -> None:
    got, headers, body = server.ask("GET", "/version", headers={"Expect": expect})
    assert got == status
    if status == 417:
        assert TypeAdapter(ErrorReply).validate_python(body, strict=True) == body
        assert body["error"]["code"] == "expectation_failed"
        assert headers["Server"] == "radixkv"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"data": b"{}"},
        {"data": b"{}", "headers": {"Content-Type": "text/plain"}},
        {"data": {"prompt": "form"}},
    ],
)
def test_a_body_that_is_not_declared_as_json_is_a_415(
    server: RunningServer, kwargs: dict[str, Any]
) -> None:
    error = error_of(server.ask("POST", "/v1/completions", **kwargs), 415)
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"\xff", b"[" * 50_000, b'{"prompt": NaN}', b'{"seed": 1e999}'],
)
def test_a_broken_body_is_a_400(server: RunningServer, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error = error_of(server.ask("POST", "/v1/completions", data=raw, headers=headers), 400)
    assert error["type"] == "invalid_request_error"


def test_a_body_over_the_limit_is_a_413(server: RunningServer) -> None:
    error = error_of(server.ask("POST", "/v1/completions", {"prompt": "x" * 70_000}), 413)
    assert "max_body" in error["message"]


def test_a_content_part_that_is_no_text_is_a_400_and_the_engine_lives(
    server: RunningServer,
) -> None:
    """IDENTITY-4"""
    parts = [
        {"type": "text", "text": "hello"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    error = error_of(server.ask("POST", CHAT, body), 400)
    assert error["param"] == "messages[0].content[1].type"
    assert server.ask("GET", "/health")[0] == 200


def test_openais_client_raises_its_own_exceptions(server: RunningServer) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="tiny", messages=HI, temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")


def test_the_callers_request_id_comes_back_unless_it_is_unsafe(server: RunningServer) -> None:
    def echoed(given: str) -> str:
        return server.ask("GET", "/version", headers={"X-Request-Id": given})[1]["X-Request-ID"]

    assert echoed("trace-1.2:3_4") == "trace-1.2:3_4"
    for unsafe in ("a b", "x" * 200, 'a"b', "-leading"):
        assert echoed(unsafe) != unsafe
        assert echoed(unsafe).startswith("req-")


def test_more_prompts_than_the_queue_could_ever_take_are_a_400() -> None:
    """SCHED-1: coming back later would not help."""
    with running_server(max_num_seqs=2, max_queue=2) as server:
        body: dict[str, Any] = {"prompt": [[5]] * 5, "max_tokens": 1}
        error = error_of(server.ask("POST", "/v1/completions", body), 400)
        assert error["param"] == "prompt" and "at most 4" in error["message"]
        for fits in ({"prompt": [[5]] * 4}, {"prompt": [5], "n": 6}):
            assert server.ask("POST", "/v1/completions", body | fits)[0] == 200


def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    with running_server(max_num_seqs=1, max_queue=0) as server:
        holder = server.client()
        stream = holder.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        answer = server.ask("POST", CHAT, {"messages": HI})
        error = error_of(answer, 429)
        assert error["code"] == "queue_full"
        assert int(answer[1]["Retry-After"]) >= 1
        stream.close()
        holder.close()
        server.wait_until(server.at_rest)
        assert server.ask("POST", CHAT, {"messages": HI, "max_tokens": 1})[0] == 200


def test_while_the_model_loads_every_route_that_needs_it_is_a_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "radixkv.http")
    server = RunningServer(None, max_body=2**20, ping_s=15)
    try:
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("POST", CHAT, {"messages": HI}),
        ):
            answer = server.ask(method, path, body)
            error = error_of(answer, 503)
            assert error["code"] == "loading" and error["message"] == "Loading model"
            assert error["type"] == "unavailable_error"
            assert answer[1]["Retry-After"]
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.ask("GET", "/version")[0] == 200
        told = [record.__dict__["fields"]["path"] for record in caplog.records]
        assert told == ["/v1/models", CHAT, "/version"], "a probe that waits is no news"
    finally:
        server.close()


async def test_a_load_that_fails_ends_the_server_with_its_reason() -> None:
    class NoModel(Exception):
        pass

    def load() -> Any:
        raise NoModel

    sock = bind("127.0.0.1", 0)
    server = HttpServer(Serving(), sock, max_body=2**20)
    with pytest.raises(NoModel):
        await run_server(
            server,
            load,
            shutdown_timeout_s=1,
            ready=lambda engine: None,
            stopping=lambda n: None,
        )
    assert sock.fileno() == -1


def test_the_address_is_one_that_this_machine_can_open() -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")):
        with bind(host, 0) as sock:
            assert url_of(sock) == f"http://{shown}:{sock.getsockname()[1]}"


def test_an_error_inside_a_stream_is_an_event_and_there_is_no_end_mark() -> None:
    """ERRORS-3: an engine that dies in mid-answer is told, and /health turns red."""
    with running_server() as server:
        body = {"messages": HI, "ignore_eos": True, "max_tokens": 3000, "stream": True}

        async def broken() -> tuple[str, list[int]]:
            async with aiohttp.ClientSession() as session:
                asked = [
                    session.post(server.url + CHAT, json=body | {"stream": s})
                    for s in (False, True)
                ]
                whole, streamed = await asyncio.gather(
                    _then_whole(asked[0]), _then_stream(asked[1], server)
                )
                async with session.get(server.url + "/health") as health:
                    return streamed, [whole, health.status]

        text, statuses = server.run(broken())
        last = [line for line in text.split("\n\n") if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert "[DONE]" not in text
        assert statuses == [503, 503]
        assert server.ask("POST", CHAT, {"messages": HI})[0] == 503


async def _then_whole(asked: Any) -> int:
    async with asked as reply:
        await reply.read()
        return int(reply.status)


async def _then_stream(asked: Any, server: RunningServer) -> str:
    """Read one event, let the engine thread fail, read the rest."""

    def fail() -> None:
        raise SystemError("the device is gone")

    async with asked as reply:
        first = await reply.content.readuntil(b"\n\n")
        core = server.engine._core
        core._send(fail)
        return str((first + await reply.read()).decode())
