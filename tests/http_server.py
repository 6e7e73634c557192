"""A real server on a free port of 127.0.0.1, over an engine with a tiny model, in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import openai

from radixkv.service.engine.engine import Engine
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.http.auth import Gate
from radixkv.service.http.server import HttpServer, bind
from radixkv.service.http.serving import Serving
from tests import tiny_models

T = TypeVar("T")
WAIT_S = 20.0


def build_engine(**settings: Any) -> Engine:
    """Build an engine over the tiny model, named ``tiny``."""
    model, tokenizer = tiny_models.build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny")
    small: dict[str, Any] = {"kv_memory": "8MiB", "max_batch_tokens": 256}
    return Engine(loaded, **(small | settings))


class RunningServer:
    """A server on its own event loop and thread; tests talk to it over its socket."""

    def __init__(
        self,
        engine: Engine | None,
        *,
        max_body: int,
        ping_s: float,
        gate: Gate | None = None,
        batch_dir: Path | None = None,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.serving, self.server = self.run(self._start(engine, max_body, ping_s, gate, batch_dir))
        self.url = self.server.url

    @property
    def engine(self) -> Engine:
        """The engine behind it."""
        return self.serving.engine

    async def _start(
        self,
        engine: Engine | None,
        max_body: int,
        ping_s: float,
        gate: Gate | None,
        batch_dir: Path | None,
    ) -> tuple[Serving, HttpServer]:
        serving = Serving(ping_s=ping_s, vllm_metric_names=True, gate=gate, batch_dir=batch_dir)
        server = HttpServer(serving, bind("127.0.0.1", 0), max_body=max_body)
        await server.start()
        if engine is not None:
            serving.start(engine)
        return serving, server

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the server's loop and wait for it."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, WAIT_S)

        return asyncio.run_coroutine_threadsafe(bounded(), self.loop).result(WAIT_S + 1)

    def close(self) -> None:
        """Stop serving and end the loop."""
        self.run(self.server.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """Return OpenAI's own client for it."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S
        )

    def ask(
        self, method: str, path: str, body: object = None, **kwargs: Any
    ) -> tuple[int, dict[str, str], Any]:
        """Send one request; returns status, headers and the JSON or text of the answer."""

        async def send() -> tuple[int, dict[str, str], Any]:
            if body is not None:
                kwargs["json"] = body
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, self.url + path, **kwargs) as reply,
            ):
                text = await reply.text()
                is_json = reply.content_type == "application/json"
                return reply.status, dict(reply.headers), json.loads(text) if is_json else text

        return self.run(send())

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Send a streaming request; returns its events, ``"[DONE]"`` as that string."""
        status, headers, text = self.ask("POST", path, body | {"stream": True})
        assert status == 200, text
        assert headers["Content-Type"].startswith("text/event-stream")
        return parse_events(text)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Poll until ``true()``; fails after WAIT_S."""

        async def poll() -> None:
            while not true():
                await asyncio.sleep(0.01)

        self.run(poll())

    def at_rest(self) -> bool:
        """Whether nothing runs, waits or holds blocks."""
        stats = self.engine.stats()
        return stats.num_running == stats.num_waiting == stats.used_blocks == 0


def parse_events(text: str) -> list[Any]:
    """Split an event stream into its data, comments left out."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block == "" or block.startswith(":"), block
    return found


@contextmanager
def running_server(
    *,
    max_body: int = 2**20,
    ping_s: float = 15.0,
    gate: Gate | None = None,
    batch_dir: Path | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve a fresh tiny engine with these settings; ``gate``: to whom."""
    with build_engine(**settings) as engine:
        server = RunningServer(
            engine, max_body=max_body, ping_s=ping_s, gate=gate, batch_dir=batch_dir
        )
        try:
            yield server
        finally:
            server.close()
