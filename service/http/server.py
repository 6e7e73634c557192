"""The life of the server: bind, listen while the model loads, serve, drain, end.

Knows sockets and signals; nothing of routes beyond the application that it is given.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from radixkv.errors import InvalidConfig
from radixkv.service.config import is_loopback
from radixkv.service.http.app import build_app
from radixkv.service.http.protocol import Protocol
from radixkv.service.http.serving import Serving

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine

_LAST_WORDS_S = 5.0
"""Time for aborted requests to tell their clients so."""

_ONE_SIGNAL_S = 0.5
"""Signals this close are one: `timeout` and some shells send to the process and to its group."""


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; raises InvalidConfig if it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as e:
        raise InvalidConfig(f"host is {host!r}, which is no address of this machine: {e}") from e
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise InvalidConfig(
                f"port {port} on {host} is in use; stop the server there, or choose another "
                "with --port"
            ) from e
        raise InvalidConfig(f"cannot listen on {host}, port {port}: {e.strerror}") from e
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address that works from this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Listens on one socket. Before ``serving`` has an engine every route that needs one is 503."""

    def __init__(
        self, serving: Serving, sock: socket.socket, *, max_body: int, any_name: bool = False
    ) -> None:
        """``any_name``: on a loopback address too, do not mind under what name we are asked."""
        self.serving = serving
        self.url = url_of(sock)
        # Without handler_cancellation a client that hangs up is not noticed before its answer is
        # done, and a generation would hold its blocks for nobody.
        self._runner = web.AppRunner(
            build_app(
                serving,
                max_body=max_body,
                # A page whose name was made to point here has no key.
                loopback_only=not (any_name or serving.gate.keyed)
                and is_loopback(sock.getsockname()[0]),
            ),
            handler_cancellation=True,
            shutdown_timeout=_LAST_WORDS_S,
        )
        self._sock = sock
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to accept connections."""
        await self._runner.setup()
        manager, loop = self._runner.server, asyncio.get_running_loop()
        assert manager is not None
        self._listener = await loop.create_server(
            lambda: Protocol(manager, loop=loop, access_log=None),  # type: ignore[arg-type]  # off
            sock=self._sock,
            backlog=128,
        )

    async def stop(self, timeout_s: float) -> bool:
        """Accept no more, let requests in flight end, abort what is left; True if all ended."""
        assert self._listener is not None
        self.serving.draining = True
        self._listener.close()
        ended = await self.serving.wait_idle(timeout_s)
        if not ended:
            for stream in list(self.serving.active):
                stream.abort()
            await self.serving.wait_idle(_LAST_WORDS_S)
        await self._runner.cleanup()
        self.serving.stop()
        return ended


async def run_server(
    server: HttpServer,
    load: Callable[[], Engine],
    *,
    shutdown_timeout_s: float,
    ready: Callable[[Engine], None],
    stopping: Callable[[int], None],
) -> bool:
    """Serve until a signal: the first drains, the second exits at once.

    ``load`` runs in a thread while /health already answers 503; what it raises is raised here.
    ``ready`` is called when requests are served, ``stopping`` with the number of those in flight.
    Returns False if the signal came before there was an engine: then ``load`` is still running.
    """
    stop = asyncio.Event()
    _on_signals(stop)
    if server.serving.gate.keyed and hasattr(signal, "SIGHUP"):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, server.serving.gate.reload)
    await server.start()
    loading = asyncio.create_task(_in_daemon_thread(load))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await server.stop(0)
        return False
    try:
        engine = loading.result()
    except BaseException:
        await server.stop(0)
        raise
    server.serving.start(engine)
    ready(engine)
    await stopped
    stopping(len(server.serving.active))
    await server.stop(shutdown_timeout_s)
    await asyncio.to_thread(engine.close)
    return True


async def _in_daemon_thread(load: Callable[[], Engine]) -> Engine:
    """Run ``load`` in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif engine is not None:
            future.set_result(engine)

    def run() -> None:
        engine, failure = None, None
        try:
            engine = load()
        except BaseException as e:
            failure = e
        loop.call_soon_threadsafe(settle, engine, failure)

    threading.Thread(target=run, name="radixkv-load", daemon=True).start()
    return await future


def _on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    heard_s: list[float] = []

    def heard() -> None:
        stop.set()
        heard_s.append(loop.time())
        if heard_s[-1] - heard_s[0] > _ONE_SIGNAL_S:
            os._exit(130)  # asked again: no handler, no thread may hold it up any more

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, heard)
        except NotImplementedError:  # Windows has no such handlers
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(heard))
