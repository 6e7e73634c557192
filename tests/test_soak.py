"""A shared server under all that clients do at once, for thousands of requests.

Nothing is lost, mixed up, counted wrongly or left behind, and the memory stays what it was.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from radixkv.service.engine.engine import Engine
from radixkv.service.engine.stream import Stream
from tests.adapter_cases import save_adapter
from tests.hostile_client import PATIENCE_S, Crowd, Traffic, come_to_rest
from tests.http_server import RunningServer, build_engine, running_server
from tests.tenant_files import bearer, open_gate

BLOCKS = 96
"""Of 16 tokens, for 32 clients whose prompts have up to some 150: not enough by half."""
GROWTH_MIB = 24
"""What the process may grow by in the last four fifths of a soak."""


class Totals:
    """The usage of all that was submitted to an engine, whoever went away meanwhile."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.requests = 0
        self._open: list[Stream] = []
        submit = engine.submit

        def noting(*args: Any, **kwargs: Any) -> Stream:
            stream = submit(*args, **kwargs)
            self._open.append(stream)
            if len(self._open) > 256:
                self.settle()
            return stream

        patch.setattr(engine, "submit", noting)

    def settle(self) -> None:
        """Add up what has finished."""
        still = []
        for stream in self._open:
            if not stream.finished:
                still.append(stream)
                continue
            self.requests += 1
            self.cached_tokens += stream.usage.cached_tokens
            self.completion_tokens += stream.usage.completion_tokens
        self._open = still


def resident_mib() -> float:
    """What this process has in memory."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    pytest.skip("this system has no /proc to read the memory from")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[RunningServer, dict[str, str]]]:
    """A server for three tenants, an adapter, and half of the blocks that are wanted."""
    save_adapter(tmp_path / "one")
    gate, keys = open_gate(
        tmp_path,
        root={"role": "admin"},
        loud={"weight": 2.0, "cache_quota": "40%", "max_concurrent": 8, "max_queued": 8},
        quiet={"cache_floor": "10%"},
    )
    with build_engine() as engine:
        block_bytes = engine.bytes_per_block
    with running_server(
        gate=gate,
        kv_memory=BLOCKS * block_bytes,
        max_model_len=256,
        lookahead_tokens=0,
        max_num_seqs=24,
        swap_memory=BLOCKS // 2 * block_bytes,
        adapter=(f"one={tmp_path / 'one'}",),
        deterministic=True,
    ) as server:
        yield server, keys


def squeeze(server: RunningServer, admin: dict[str, str]) -> None:
    """Let the pool run short for certain, however fast this machine is: 16 sequences that begin
    together in two blocks each, and end in eight."""
    at_once, all_here = 16, threading.Event()

    async def send() -> list[int]:
        async with aiohttp.ClientSession(headers=admin) as session:
            body = {"max_tokens": 100, "ignore_eos": True, "seed": 0}
            url = f"{server.url}/v1/completions"
            prompts = [[7 + i] * 20 for i in range(at_once)]
            sent = [session.post(url, json=body | {"prompt": p}) for p in prompts]
            return [reply.status for reply in await asyncio.gather(*sent)]

    held = server.engine._core.call(all_here.wait)
    try:
        asked = asyncio.run_coroutine_threadsafe(send(), server.loop)
        server.wait_until(lambda: len(server.serving.active) == at_once)
    finally:
        all_here.set()
    held.result()
    assert asked.result(PATIENCE_S) == [200] * at_once
    assert server.engine.stats().preemptions_total > 0


def soak(
    server: RunningServer, keys: dict[str, str], totals: Totals, first: int, rest: int
) -> float:
    """Send all, check all; returns by how many MiB the process grew during the rest."""
    traffic = Traffic(1, keys, ("tiny", "tiny:one"))
    crowd = Crowd(server.url, keys, traffic)
    squeeze(server, bearer(keys["root"]))
    asyncio.run(crowd.send(first))
    before = resident_mib()
    asyncio.run(crowd.send(rest))
    grown = resident_mib() - before

    ledger = crowd.ledger
    print(f"\n{dict(ledger.fates)}, {ledger.repeated} equal answers, {grown:.1f} MiB more")
    assert not ledger.wrong, f"{len(ledger.wrong)}: " + "\n".join(ledger.wrong[:5])
    assert ledger.fates.total() == first + rest
    stats = come_to_rest(server, bearer(keys["root"]))
    assert stats.cache.evicted_blocks > 0, "the pool was too large"
    totals.settle()
    assert totals.requests == stats.requests_total
    assert totals.cached_tokens == stats.prompt_tokens_cached_total
    assert ledger.told_cached <= totals.cached_tokens <= stats.prompt_tokens_total
    assert totals.completion_tokens == stats.generation_tokens_total
    for name in ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "requests"):
        parts = [getattr(tenant, f"{name}_total") for tenant in stats.by_tenant.values()]
        assert sum(parts) == getattr(stats, f"{name}_total"), name
    return grown


def test_hundreds_of_mixed_requests_lose_nothing(
    shared: tuple[RunningServer, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-5, METRICS-1, SECURITY-7: a short soak."""
    server, keys = shared
    soak(server, keys, Totals(server.engine, monkeypatch), 100, 300)


@pytest.mark.soak
def test_ten_thousand_mixed_requests_lose_nothing_and_the_memory_is_flat(
    shared: tuple[RunningServer, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-1, LEAK-5, METRICS-1, METRICS-2, SECURITY-7"""
    server, keys = shared
    grown = soak(server, keys, Totals(server.engine, monkeypatch), 2_000, 8_000)
    assert grown < GROWTH_MIB
