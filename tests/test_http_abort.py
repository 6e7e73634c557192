"""Clients that hang up, long prompts beside health checks, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from radixkv.service.http.server import HttpServer, bind, run_server
from radixkv.service.http.serving import Serving
from tests.http_server import RunningServer, build_engine, parse_events, running_server

HI: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"messages": HI, "ignore_eos": True, "max_tokens": 4000}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 3}),
        ("/v1/completions", {"prompt": ["the", "user"], "n": 2}),
    ],
)
def test_a_client_that_hangs_up_frees_everything_within_a_second(
    server: RunningServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
    stream: bool,
) -> None:
    """LEAK-5"""
    caplog.set_level("INFO", logger="radixkv.http")

    async def hang_up() -> None:
        body = ENDLESS | fields | {"stream": stream}
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(server.url + path, json=body))
            while not server.engine.stats().num_running:
                await asyncio.sleep(0.005)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    server.run(hang_up())
    gone_s = time.monotonic()
    server.wait_until(server.at_rest)
    assert time.monotonic() - gone_s < 1
    assert "aiohttp.server" not in {record.name for record in caplog.records}
    lines = [r.__dict__["fields"] for r in caplog.records if r.name == "radixkv.http"]
    assert [line["status"] for line in lines] == [499]
    assert server.serving.active == set()
    assert server.engine.check() == []


def test_one_of_many_disconnecting_clients_gets_its_whole_answer(server: RunningServer) -> None:
    """A storm of streams of which most hang up at random moments; the rest are complete."""

    async def one(session: aiohttp.ClientSession, i: int) -> bool:
        body = {"messages": HI, "ignore_eos": True, "max_tokens": 12, "stream": True, "seed": i}
        async with session.post(server.url + CHAT, json=body) as reply:
            if i % 3:
                for _ in range(i % 7):
                    await reply.content.readuntil(b"\n\n")
                return False  # leaving the block closes the connection
            return bool(parse_events(await reply.text())[-1] == "[DONE]")

    async def storm() -> list[bool]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return list(await asyncio.gather(*(one(session, i) for i in range(64))))

    assert server.run(storm()).count(True) == 22
    server.wait_until(server.at_rest)
    stats = server.engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert server.engine.check() == []


def test_health_metrics_and_models_answer_during_a_long_prefill() -> None:
    """ERRORS-2"""
    with running_server(max_batch_tokens=2048, kv_memory="16MiB") as server:

        async def probe() -> list[float]:
            times = []
            async with aiohttp.ClientSession() as session:
                body = {"prompt": [5 + i % 200 for i in range(3900)], "max_tokens": 1}
                long = asyncio.create_task(_status(session.post, server, "/v1/completions", body))
                while not long.done():
                    for path in ("/health", "/metrics", "/v1/models"):
                        began_s = time.monotonic()
                        assert await _status(session.get, server, path) == 200
                        times.append(time.monotonic() - began_s)
                assert await long == 200
            return times

        times = sorted(server.run(probe()))
        assert len(times) >= 6
        assert times[len(times) // 2] < 0.2
        assert times[-1] < 1.0, "one may meet a busy machine; none may wait for the prefill"


async def _status(method: Any, server: RunningServer, path: str, body: Any = None) -> int:
    async with method(server.url + path, json=body) as reply:
        await reply.read()
        return int(reply.status)


@pytest.mark.parametrize("patient", [True, False])
async def test_stopping_drains_and_then_aborts(patient: bool) -> None:
    """With time, what runs is finished; without, it is told; new requests are refused."""
    max_tokens = 60 if patient else 4000
    with build_engine() as engine:
        serving = Serving()
        server = HttpServer(serving, bind("127.0.0.1", 0), max_body=2**20)
        await server.start()
        serving.start(engine)
        body = ENDLESS | {"max_tokens": max_tokens}
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(30):
                # A connection that is open before the stop, to ask on afterwards.
                async with session.get(server.url + "/health") as reply:
                    assert await reply.json() == {"status": "ok"}
                streamed = await session.post(server.url + CHAT, json=body | {"stream": True})
                await streamed.content.readuntil(b"\n\n")
                whole = asyncio.create_task(session.post(server.url + CHAT, json=body))
                while engine.stats().num_running < 2:
                    await asyncio.sleep(0.005)
                stopping = asyncio.create_task(server.stop(20 if patient else 0))
                text = (await streamed.content.read()).decode()
                answer = await whole
                reply_body = await answer.json()
                assert await stopping is patient
        events = parse_events(text)
        if patient:
            assert events[-1] == "[DONE]"
            assert answer.status == 200
            assert reply_body["usage"]["completion_tokens"] == 60
        else:
            assert events[-1]["error"]["code"] == "aborted"
            assert answer.status == 503
            assert reply_body["error"]["code"] == "aborted"
        assert serving.active == set()


async def test_a_server_that_is_stopping_takes_nothing_new() -> None:
    with build_engine() as engine:
        serving = Serving()
        server = HttpServer(serving, bind("127.0.0.1", 0), max_body=2**20)
        await server.start()
        serving.start(engine)
        serving.draining = True
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url + CHAT, json={"messages": HI}) as reply,
        ):
            assert reply.status == 503
            assert json.loads(await reply.text())["error"]["code"] == "shutting_down"
        await server.stop(0)


async def test_a_signal_drains_and_closes_the_engine() -> None:
    import os
    import signal

    engine = build_engine()
    said: list[object] = []

    def ready(_: object) -> None:
        said.append("ready")
        os.kill(os.getpid(), signal.SIGTERM)

    served = await asyncio.wait_for(
        run_server(
            HttpServer(Serving(), bind("127.0.0.1", 0), max_body=2**20),
            lambda: engine,
            shutdown_timeout_s=5,
            ready=ready,
            stopping=said.append,
        ),
        30,
    )
    assert served
    assert said == ["ready", 0]
    assert not engine.alive
