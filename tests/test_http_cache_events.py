"""GET /v1/cache/events: what happened, in counts, to those whose it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from radixkv.service.http import cache_events as module
from radixkv.service.http.auth import Gate
from radixkv.service.tenants_edit import remove_tenant
from radixkv.service.tenants_file import TenantsFile
from tests.http_server import WAIT_S, RunningServer, running_server
from tests.tenant_files import bearer, open_gate, write_tenants

TEXT = "the user is in the system and the assistant is to answer. " * 3


class Hearing:
    """A client that listens; ``until`` returns all that came up to an event of a type."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply
        self.heard: list[Any] = []

    async def until(self, kind: str) -> list[Any]:
        while True:
            line = (await self._reply.content.readline()).decode()
            assert line, "the stream has ended"
            if line.startswith("data: ") and "[DONE]" not in line:
                self.heard.append(json.loads(line[6:]))
                if self.heard[-1]["type"] == kind:
                    return self.heard

    async def rest(self) -> bytes:
        """What comes until the server ends the stream."""
        return await self._reply.content.read()


@asynccontextmanager
async def listening(
    server: RunningServer, headers: dict[str, str] | None = None
) -> AsyncIterator[Hearing]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.url}/v1/cache/events", headers=headers) as reply,
    ):
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        yield Hearing(reply)


async def ask(server: RunningServer, prompt: str, headers: dict[str, str] | None = None) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.url}/v1/completions",
            json={"prompt": prompt, "max_tokens": 2},
            headers=headers,
        ) as reply,
    ):
        assert reply.status == 200, await reply.text()


def test_a_client_hears_of_hits_stores_evictions_and_resets() -> None:
    with running_server(kv_memory="64KiB", max_model_len=160) as server:

        async def listen() -> list[Any]:
            async with listening(server) as hearing:
                await ask(server, TEXT[:120])
                await hearing.until("stored")
                await ask(server, TEXT[:120])
                for i in range(8):
                    await ask(server, f"{i} {TEXT[:100]}")
                await hearing.until("evicted")
                while not server.at_rest():
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.engine.cache.reset)
                server.engine.generate([5, 6], max_tokens=1)
                return await hearing.until("cleared")

        heard = server.run(listen())
        kinds = [event["type"] for event in heard]
        assert kinds[0] == "hit" and kinds[-1] == "cleared"
        hits = [event["counts"] for event in heard if event["type"] == "hit"]
        assert hits[0]["tokens"] == 0 and hits[1]["tokens"] == hits[1]["queried_tokens"] - 1
        assert {event["tenant"] for event in heard} == {"local"}
        assert all(set(event) == {"object", "type", "tenant", "time", "counts"} for event in heard)
        numbers = [n for event in heard for n in event["counts"].values()]
        assert all(isinstance(n, int) and n >= 0 for n in numbers)
        server.wait_until(lambda: not server.engine.cache._events.active)


def test_pins_are_heard_of_when_they_begin_and_when_they_expire() -> None:
    with running_server() as server:

        async def listen() -> list[Any]:
            async with listening(server) as hearing, aiohttp.ClientSession() as session:
                body = {"prompt": TEXT, "ttl": "1s"}
                async with session.post(f"{server.url}/v1/cache/pin", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                await hearing.until("pinned")
                pins = server.engine._core.cache.pins
                later = pins.clock() + 2
                pins.clock = lambda: later
                await ask(server, "hello you")
                return await hearing.until("unpinned")

        heard = server.run(listen())
        kinds = [event["type"] for event in heard]
        assert "pinned" in kinds and kinds.index("expired") < kinds.index("unpinned")
        blocks = {event["type"]: event["counts"].get("blocks") for event in heard}
        assert blocks["pinned"] == blocks["expired"] == blocks["unpinned"] > 0


def test_a_tenant_hears_nothing_of_another(tmp_path: Path) -> None:
    """SECURITY-5: not text, not counts, not even when something happens."""
    gate, keys = open_gate(tmp_path, alice={}, bob={}, root={"role": "admin"})
    with running_server(gate=gate) as server:

        async def listen() -> tuple[list[Any], list[Any]]:
            async with (
                listening(server, bearer(keys["bob"])) as bob,
                listening(server, bearer(keys["root"])) as root,
            ):
                await ask(server, TEXT, bearer(keys["alice"]))
                await root.until("stored")
                await ask(server, "hello you " * 10, bearer(keys["bob"]))
                return await bob.until("stored"), root.heard

        bob, root = server.run(listen())
        assert {event["tenant"] for event in bob} == {"bob"}
        assert {event["tenant"] for event in root} == {"alice"}
        assert "system" not in json.dumps(root), "no text"
        assert server.ask("GET", "/v1/cache/events")[0] == 401


@pytest.mark.parametrize("change", [{}, {"role": "user"}], ids=["removed", "no longer an admin"])
def test_who_was_let_in_once_hears_nothing_more_when_the_key_has_ended(
    tmp_path: Path, change: dict[str, str]
) -> None:
    """SECURITY: a connection that stays open would else show an admin that was everybody's part."""
    file, keys = write_tenants(tmp_path, acme={}, root={"role": "admin"})
    gate = Gate(TenantsFile(file))
    with running_server(gate=gate, kv_memory="64KiB", max_model_len=160) as server:

        async def listen() -> tuple[list[Any], bytes]:
            async with listening(server, bearer(keys["root"])) as hearing:
                await ask(server, TEXT[:120], bearer(keys["acme"]))
                await ask(server, "mine " + TEXT[:120], bearer(keys["root"]))
                while hearing.heard[-1:] == [] or hearing.heard[-1]["tenant"] != "root":
                    await hearing.until("stored")
                heard = list(hearing.heard)
                if change:
                    file.write_text(file.read_text().replace('"admin"', '"user"'))
                else:
                    remove_tenant(file, "root")
                await asyncio.to_thread(server.run, asyncio.to_thread(gate.reload))
                await ask(server, "another " + TEXT[:120], bearer(keys["acme"]))
                return heard, await hearing.rest()

        heard, rest = asyncio.run(asyncio.wait_for(listen(), WAIT_S))
        assert "acme" in {event["tenant"] for event in heard}
        assert b'"tenant":"acme"' not in rest


def test_too_many_listeners_of_one_tenant_are_refused_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LISTENERS", 1)
    gate, keys = open_gate(tmp_path, alice={}, bob={})
    with running_server(gate=gate) as server:

        async def listen() -> int:
            async with (
                listening(server, bearer(keys["alice"])),
                listening(server, bearer(keys["bob"])),
                aiohttp.ClientSession() as session,
                session.get(
                    f"{server.url}/v1/cache/events", headers=bearer(keys["alice"])
                ) as reply,
            ):
                return reply.status

        assert server.run(listen()) == 429


def test_a_server_that_stops_ends_the_stream() -> None:
    with running_server() as server:

        async def listen() -> bytes:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{server.url}/v1/cache/events") as reply,
            ):
                stopping = asyncio.create_task(server.server.stop(0))
                rest = await asyncio.wait_for(reply.content.read(), WAIT_S)
                await stopping
                return rest

        assert b"[DONE]" in server.run(listen())
