"""Starts a service and says how it goes, until it is told to stop; knows settings, no flags."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import radixkv
from radixkv.service.config import Settings, is_loopback

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


def run_service(settings: Settings) -> int:
    """Bind, load, serve; returns the exit code."""
    from radixkv.service.http.auth import Gate
    from radixkv.service.http.server import HttpServer, bind, run_server
    from radixkv.service.http.serving import Serving
    from radixkv.service.logs import configure_logs
    from radixkv.service.tenants_file import TenantsFile

    configure_logs(settings.server.log_format)
    if settings.server.log_format == "json" or not sys.stderr.isatty():
        # The bars of transformers and the hub, which look here when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    say = Narrator(settings.server.log_format == "json")
    tenants = TenantsFile(Path(settings.tenants)) if settings.tenants is not None else None
    sock = bind(settings.server.host, settings.server.port)
    if not is_loopback(settings.server.host):
        risk = (
            "anyone who reaches this host may use the server: it asks for no key"
            if tenants is None
            else "keys and texts cross the network in the clear: put a proxy with TLS in front"
        )
        say(risk, warn=True)

    async def main() -> bool:
        gate = Gate(tenants, open_metrics=settings.open_metrics)
        serving = Serving(
            vllm_metric_names=settings.vllm_metrics,
            inspect_text=settings.inspect_text,
            gate=gate,
            adapter_dir=Path(settings.adapter_dir) if settings.adapter_dir else None,
            batch_dir=Path(settings.batch_dir) if settings.batch_dir else None,
        )
        server = HttpServer(
            serving,
            sock,
            max_body=settings.server.max_body,
            any_name=settings.insecure_remote,
        )
        return await run_server(
            server,
            lambda: _load(settings, say),
            shutdown_timeout_s=settings.server.shutdown_timeout,
            ready=lambda engine: say.ready(engine, server.url, keyed=tenants is not None),
            stopping=lambda n: say(
                f"stopping; requests that may still finish: {n} (again: at once)"
            ),
        )

    if not asyncio.run(main()):
        say("stopped before the model was loaded")
        sys.stderr.flush()
        os._exit(0)  # a thread is still inside the loader and cannot be told to stop
    say("stopped")
    return 0


def _load(settings: Settings, say: Narrator) -> Engine:
    say(f"radixkv {radixkv.__version__}: starting {settings.engine.model}")
    from radixkv.service.engine.preflight import check_settings
    from radixkv.service.engine.resolving import resolve_model

    path = resolve_model(settings.engine.model, progress=say)
    check_settings(path, settings.engine)  # before the seconds that torch and the weights take
    from radixkv.service.engine.engine import Engine

    engine = Engine(config=settings.engine, path=path, progress=say)
    say("warming up")
    engine.warm_up()
    if settings.public_prompts:
        say(f"computing public prompts: {len(settings.public_prompts)}")
        engine.share_system_prompts(settings.public_prompts)
    return engine


class Narrator:
    """Says how starting and stopping go: to people with the seconds so far, or to the log."""

    def __init__(self, as_log: bool) -> None:
        self._log = logging.getLogger("radixkv.server") if as_log else None
        self._console = Console(stderr=True, highlight=False)
        self._began_s = time.monotonic()

    def __call__(self, message: str, *, warn: bool = False) -> None:
        """Say one line."""
        if self._log is not None:
            self._log.log(logging.WARNING if warn else logging.INFO, message)
            return
        clock = f"{time.monotonic() - self._began_s:6.1f}s"
        line = f"[dim]{clock}[/dim]  " + ("[yellow]warning:[/yellow] " if warn else "")
        self._console.print(line, end="")
        self._console.print(message, markup=False, soft_wrap=True)

    def ready(self, engine: Engine, url: str, *, keyed: bool = False) -> None:
        """Say what is served and where, with a line to try it that works when pasted."""
        stats, config = engine.stats(), engine.config
        mode = ", deterministic" if config.deterministic else ""
        self(
            f"serving {engine.model_name} on {url} ({engine.dtype}, {engine.device}, "
            f"{engine.decoder} decoder{mode}, context {engine.max_model_len} tokens, "
            f"{stats.num_blocks} blocks of {config.block_size})"
        )
        if self._log is None:
            self._console.print("\nTry it:", style="bold")
            # Plain print: a terminal may wrap it, but no line end gets into what is copied.
            print(curl_line(url, engine.model_name, keyed=keyed), flush=True)
            self._console.print("\nLook into the cache:", style="bold")
            print(f"{url}/dashboard", flush=True)
            self._console.print("\nStop with Ctrl-C.", style="dim")


def curl_line(url: str, model: str, *, keyed: bool = False) -> str:
    """Return a shell command that streams an answer from the server at ``url``.

    ``keyed``: with the key that is in the environment of the shell.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "stream": True,
        "max_tokens": 100,
    }
    key = '-H "Authorization: Bearer $RADIXKV_API_KEY" ' if keyed else ""
    return (
        f"curl -N {shlex.quote(url + '/v1/chat/completions')} -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body))}"
    )
