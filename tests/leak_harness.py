"""An attacker on a server that several tenants share: what can one learn of another's prompts?

Every experiment is a pair of trials that differ in one thing alone, whether the victim has sent
the prompt that the attacker tries. Trials are interleaved and in random order, so that what a busy
machine does falls on both alike, and a classifier is judged by ranks, which outliers do not move.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.http_server import RunningServer
from tests.tenant_files import Keys, bearer

Ids = list[int]
WORST_AUC = 0.1
"""How far from a coin a classifier may be that learns nothing; it has few trials."""
BEST_AUC = 0.9
"""How well it must do where there is something to learn."""


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """How often one of ``positive`` is below one of ``negative``, ties counting half: 0.5 is a
    coin, 1.0 tells them apart every time."""
    below = sum((p < n) + 0.5 * (p == n) for p in positive for n in negative)
    return below / (len(positive) * len(negative))


@dataclass(slots=True)
class Probe:
    """What one request told its sender, and what it made the engine do."""

    ttft_s: float
    total_s: float
    cached_tokens: int
    steps: int
    usage: dict[str, Any]


@contextmanager
def held(server: RunningServer) -> Iterator[None]:
    """Let the engine begin no step inside."""
    release = threading.Event()
    waiting = server.engine._core.call(release.wait)
    try:
        yield
    finally:
        release.set()
        waiting.result()


class Party:
    """One tenant with a connection of its own."""

    def __init__(self, server: RunningServer, key: str) -> None:
        self._server = server
        self._headers = bearer(key) | {"Content-Type": "application/json"}
        parts = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)

    def send(self, prompt: Ids | list[Ids], **fields: Any) -> Probe:
        """Stream one token after ``prompt``, or after each, and look at all that is shown."""
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        headers = self._headers | body.pop("headers", {})
        counters = self._server.engine._core.counters  # which are ahead of the snapshot
        before = counters.steps
        raw = json.dumps(body)
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", raw, headers)
        reply = self._connection.getresponse()
        assert reply.status == 200, reply.read()
        first = reply.readline()
        ttft_s = time.perf_counter() - began_s
        rest = reply.read()
        total_s = time.perf_counter() - began_s
        events = [
            json.loads(block.removeprefix(b"data: "))
            for block in (first + rest).split(b"\n\n")
            if block.startswith(b"data: {")
        ]
        usage = events[-1]["usage"]
        return Probe(
            ttft_s=ttft_s,
            total_s=total_s,
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            steps=counters.steps - before,
            usage=usage,
        )

    def race(self, prompts: Sequence[Ids], ahead: Callable[[], object] = lambda: None) -> list[int]:
        """Send several prompts at once; returns their places in the order in which they end.

        The engine is held until all have arrived, since how long that takes is not what is looked
        at. ``ahead`` is called before they are sent.
        """
        body = {"prompt": prompts, "max_tokens": 1, "ignore_eos": True, "stream": True}
        active = self._server.serving.active
        self._server.wait_until(lambda: not active)  # what was answered has also ended
        with held(self._server):
            ahead()
            self._connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            self._server.wait_until(lambda: len(active) == len(prompts))
        reply = self._connection.getresponse()
        assert reply.status == 200, reply.read()
        ended = []
        for block in reply.read().split(b"\n\n"):
            if block.startswith(b"data: {"):
                for choice in json.loads(block.removeprefix(b"data: "))["choices"]:
                    if choice["finish_reason"]:
                        ended.append(choice["index"])
        assert sorted(ended) == list(range(len(prompts)))
        return ended

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Send any request; returns status and text of the answer, its headers included."""
        raw = None if body is None else json.dumps(body)
        self._connection.request(method, path, raw, self._headers)
        reply = self._connection.getresponse()
        text = reply.read().decode()
        return reply.status, f"{reply.getheaders()}\n{text}"

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


@dataclass(slots=True)
class Samples:
    """What was measured of prompts that the victim had sent, and of others."""

    sent: list[float] = field(default_factory=list)
    unsent: list[float] = field(default_factory=list)

    @property
    def auc(self) -> float:
        """How well the two are told apart."""
        return auc(self.sent, self.unsent)


class Attack:
    """The victim, the attacker, and prompts that nobody has seen before."""

    def __init__(self, server: RunningServer, keys: Keys, *, seed: int = 0) -> None:
        self.server = server
        self.victim = Party(server, keys["victim"])
        self.attacker = Party(server, keys["attacker"])
        self.snoop = Party(server, keys["snoop"])  # an attacker who has not forged anything
        self.admin = Party(server, keys["root"])
        self.random = random.Random(seed)
        self._next = 3

    def idle(self) -> bool:
        """Whether nothing runs or waits; pins may stay."""
        stats = self.server.engine.stats()
        return stats.num_running == stats.num_waiting == 0

    def close(self) -> None:
        """Hang up all."""
        for party in (self.victim, self.attacker, self.snoop, self.admin):
            party.close()

    def prompt(self, length: int) -> Ids:
        """Draw a prompt; two never begin alike for more than a few tokens."""
        return [self.random.randrange(3, 300) for _ in range(length)]

    def prompts(self, number: int, length: int) -> list[Ids]:
        """Draw prompts of which no two, of those drawn here, begin with the same token."""
        firsts = range(self._next, self._next + number)
        self._next += number
        assert firsts.stop <= 300, "there are no more tokens"
        return [[first, *self.prompt(length - 1)] for first in firsts]

    def forget(self) -> None:
        """Empty the cache, as an admin may."""
        self.server.wait_until(self.idle)
        status, text = self.admin.ask("POST", "/v1/cache/reset")
        assert status == 200, text

    def trials(self, length: int) -> Iterator[tuple[bool, Ids]]:
        """Yield for ever (sent?, a prompt for the attacker): each pair in random order, and the
        victim sends one prompt before each, so both follow on the same traffic."""
        while True:
            pair = [True, False]
            self.random.shuffle(pair)
            for sent in pair:
                guess, decoy = self.prompt(length), self.prompt(length)
                self.victim.send(guess if sent else decoy)
                yield sent, guess


def settle(measure: Callable[[int], float], *, rounds: Sequence[int]) -> float:
    """Measure an AUC that should be 0.5, with more trials while it looks as if it were not.

    Few trials scatter; a leak stays where it is however many there are.
    """
    found = 0.0
    for trials in rounds:
        found = measure(trials)
        if abs(found - 0.5) <= WORST_AUC / 2:
            break
    return found
