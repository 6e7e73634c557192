"""Traffic such as a shared server meets, drawn from a seed, and what became of each request.

Requests are drawn from few prompts, settings and seeds, so that equal ones recur under all tenants,
streamed and whole, cached and not: their answers must be equal each time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from radixkv.service.engine.counters import EngineStats
from tests.http_server import RunningServer
from tests.tenant_files import bearer

WORDS = ("the", "hello", "and", "you", "system", "user", "assistant", "to", "of", "is", "in")
_COUNT = "/v1/messages/count_tokens"
AT_ONCE = 32
PATIENCE_S = 60.0
MAX_WRONG = 20
"""When so much went wrong, no more is sent."""
BAD: tuple[tuple[str, bytes | dict[str, Any]], ...] = (
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hello"}'),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 0}),
    ("/v1/completions", {"prompt": [10**6], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "the " * 4000, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "the", "model": "another"}),
    ("/v1/completions", {"prompt": "the", "temperature": "hot"}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "no limit"}]}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "system"}]}),
    ("/v1/cache/pin", {"tokens": []}),
    ("/v1/cache/unpin", {"id": "pin-nobody"}),
    ("/v1/cache/explain", b"\xff\xfe"),
)


@dataclass(slots=True)
class Ledger:
    """What became of all requests."""

    fates: Counter[str] = field(default_factory=Counter)
    """``answered``, ``refused <status>`` where that is right, ``left``."""
    wrong: list[str] = field(default_factory=list)
    """What must not be, in words."""
    answers: dict[str, Any] = field(default_factory=dict)
    """By request; whoever sends the same later must be told the same."""
    repeated: int = 0
    told_cached: int = 0
    """Cached tokens, as the answers had it."""

    def note(self, asked: str, answer: Any) -> None:
        """Compare an answer with the one that the same request had before."""
        if asked not in self.answers:
            self.answers[asked] = answer
        elif self.answers[asked] == answer:
            self.repeated += 1
        else:
            self.wrong.append(f"{asked} was answered {self.answers[asked]!r}, then {answer!r}")


@dataclass(slots=True)
class Call:
    """One request: where, what, by whom, and when its client goes away, if it does."""

    tenant: str
    path: str
    body: bytes | dict[str, Any] | None
    bad: bool = False
    leaves_after_s: float | None = None
    method: str = "POST"


class Traffic:
    """Draws calls. ``models``: ids that are served; ``tenants``: the first is an admin."""

    def __init__(self, seed: int, tenants: Mapping[str, str], models: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._tenants = tuple(tenants)
        self._models = models
        self.public: set[str] = set()
        """Ids of public prompts, as they are declared."""

    def draw(self) -> Call:
        """Draw one call: 5 % are bad, and of 10 % the client leaves at a random moment."""
        rng = self._random
        tenant = rng.choice(self._tenants)
        if rng.random() < 0.05:
            path, raw = rng.choice(BAD)
            return Call(tenant, path, raw, bad=True)
        call = self._generation(tenant) if rng.random() < 0.8 else self._other(tenant)
        if rng.random() < 0.1:
            call.leaves_after_s = rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.4)))
        return call

    def _text(self) -> str:
        """Words that begin like those of other prompts and part from them somewhere."""
        rng = self._random
        topic = random.Random(rng.randrange(6))
        words = [topic.choice(WORDS) for _ in range(60)][: rng.choice((4, 30, 60))]
        return " ".join(words + [rng.choice(WORDS)] * (rng.random() < 0.3))

    def _origin(self) -> dict[str, Any]:
        rng = self._random
        found: dict[str, Any] = {}
        if rng.random() < 0.2:
            found["cache_salt"] = rng.choice(("one", "two"))
        if rng.random() < 0.3:
            found["priority"] = rng.randrange(-2, 3)
        if rng.random() < 0.25:
            found["service_tier"] = "batch"
        if rng.random() < 0.2:
            found["prompt_cache_key"] = rng.choice(("k1", "k2"))
        return found

    def _messages(self) -> list[dict[str, Any]]:
        rng = self._random
        messages = [{"role": "user", "content": self._text()}]
        if rng.random() < 0.3:
            messages += [
                {"role": "assistant", "content": "is in"},
                {"role": "user", "content": "to"},
            ]
        return messages

    def _generation(self, tenant: str) -> Call:
        rng = self._random
        body = self._origin() | {
            "model": rng.choice(self._models),
            "max_tokens": rng.choice((1, 16)),
            "seed": rng.randrange(2),
            "stream": rng.random() < 0.5,
        }
        kind = rng.random()
        if kind < 0.3:
            messages = self._messages()
            if rng.random() < 0.1:
                part = {
                    "type": "text",
                    "text": self._text(),
                    "cache_control": {"type": "ephemeral"},
                }
                messages[0]["content"] = [part]
            return Call(tenant, "/v1/messages", body | {"messages": messages})
        if rng.random() < 0.2:
            body["radixkv"] = {"explain": True}
        body |= {"n": rng.choice((1, 1, 3)), "ignore_eos": True}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if kind < 0.7:
            return Call(tenant, "/v1/chat/completions", body | {"messages": self._messages()})
        prompt: Any = self._text()
        if rng.random() < 0.3 and "radixkv" not in body:  # one prompt is explained at a time
            prompt = [prompt, self._text()]
        if rng.random() < 0.1 and not body["stream"]:
            body |= {"echo": True, "logprobs": 2}
        return Call(tenant, "/v1/completions", body | {"prompt": prompt})

    def _other(self, tenant: str) -> Call:
        rng = self._random
        prompt = self._origin() | {"prompt": self._text()}
        admin = self._tenants[0]
        calls = [
            Call(tenant, "/v1/cache/prewarm", prompt),
            Call(tenant, "/v1/cache/explain", prompt),
            Call(tenant, "/v1/cache/pin", prompt | {"ttl": "1s", "name": rng.choice("xyz")}),
            Call(tenant, "/v1/cache/unpin", {"name": rng.choice("xyz")}),
            Call(tenant, "/v1/cache/tree?text=true", None, method="GET"),
            Call(tenant, "/v1/cache/stats?window=5m", None, method="GET"),
            Call(tenant, "/v1/cache/pins", None, method="GET"),
            Call(tenant, "/v1/cache/events", None, method="GET", leaves_after_s=0.1),
            Call(tenant, "/tokenize", {"prompt": self._text()}),
            Call(tenant, _COUNT, {"model": "tiny", "messages": self._messages()}),
            Call(admin, "/v1/cache/public", {"prompt": self._text()}),
            Call(admin, "/v1/cache/reset", None),
            Call(admin, "/metrics", None, method="GET"),
        ]
        call = rng.choice(calls)
        if self.public and rng.random() < 0.05:
            call = Call(admin, f"/v1/cache/public/{self.public.pop()}", None, method="DELETE")
        return call


class Crowd:
    """Sends the calls, so many at once, and looks at each answer."""

    def __init__(self, url: str, keys: Mapping[str, str], traffic: Traffic) -> None:
        self.ledger = Ledger()
        self._url = url
        self._keys = keys
        self._traffic = traffic

    async def send(self, number: int) -> None:
        """Send so many calls and wait for the last."""
        left = iter(range(number))

        async def client() -> None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                for _ in left:
                    if len(self.ledger.wrong) >= MAX_WRONG:
                        return
                    await self._one(session, self._traffic.draw())

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def _one(self, session: aiohttp.ClientSession, call: Call) -> None:
        try:
            async with asyncio.timeout(call.leaves_after_s):
                fate = await self._ask(session, call)
        except TimeoutError:
            fate = "left"
            if call.leaves_after_s is None:
                self.ledger.wrong.append(f"no answer to {call}")
        except (aiohttp.ClientError, AssertionError, LookupError, ValueError) as e:
            fate = "broken"
            self.ledger.wrong.append(f"{call}: {e!r}")
        self.ledger.fates[fate] += 1

    async def _ask(self, session: aiohttp.ClientSession, call: Call) -> str:
        headers = bearer(self._keys[call.tenant]) | {"Content-Type": "application/json"}
        data = call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()
        async with session.request(
            call.method,
            self._url + call.path,
            data=None if call.body is None else data,
            headers=headers,
        ) as reply:
            text = await reply.text()
        if reply.status != 200:
            code = json.loads(text)["error"].get("code")
            allowed = _BAD_IS if call.bad else _REFUSALS.get(call.path, frozenset())
            if call.method == "DELETE":
                allowed = frozenset(
                    {404}
                )  # its declaration was answered late, to one who asked twice
            assert reply.status in allowed | {429}, f"{reply.status}: {text}"
            return f"refused {reply.status} {code}"
        assert not call.bad, f"was accepted: {text}"
        if call.path == "/v1/cache/public":
            self._traffic.public.add(json.loads(text)["id"])
        if call.path in _GENERATING:
            assert isinstance(call.body, dict)
            events = _events(text) if call.body["stream"] else None
            if call.path == "/v1/messages":
                answer, cached = _message(text, events)
            else:
                answer, cached = _choices(text, events)
            self.ledger.told_cached += cached
            said = {k: v for k, v in call.body.items() if k not in _SAME_ANSWER}
            self.ledger.note(f"{call.path} {json.dumps(said)}", answer)
        return "answered"


def come_to_rest(server: RunningServer, admin: Mapping[str, str]) -> EngineStats:
    """Wait until nobody asks, let all pins go, and see that nothing else is held."""
    server.wait_until(lambda: not server.serving.active)
    status, _, pins = server.ask("GET", "/v1/cache/pins", headers=admin)
    assert status == 200, pins
    for pin in pins["data"]:
        server.ask("POST", "/v1/cache/unpin", {"id": pin["id"]}, headers=admin)
    server.wait_until(server.at_rest)
    assert server.engine.failure is None
    assert server.engine.check() == []
    stats = server.engine.stats()
    assert stats.violations_total == 0
    assert stats.pinned_blocks == stats.swap_used_bytes == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    return stats


_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_SAME_ANSWER = frozenset(
    {
        "stream", "stream_options", "cache_salt", "priority", "service_tier", "prompt_cache_key",
        "radixkv",
    }
)  # fmt: skip
"""Fields that change nothing in what the model says."""
_BAD_IS = frozenset({400, 404, 413})
_REFUSALS: Mapping[str, frozenset[int]] = {
    "/v1/cache/pin": frozenset({409}),  # over its budget
    "/v1/cache/unpin": frozenset({404}),  # it has expired, or was never made
    "/v1/cache/reset": frozenset({403, 409}),
    "/v1/cache/public": frozenset({400, 404}),  # no more room for any, or withdrawn meanwhile
}


def _events(text: str) -> list[Any]:
    """The data of a stream that has ended as it should."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    data = [line.removeprefix("data: ") for line in lines]
    if data[-1] == "[DONE]":
        data.pop()
    else:
        assert json.loads(data[-1])["type"] == "message_stop", data[-1]
    return [json.loads(item) for item in data]


def _message(text: str, events: list[Any] | None) -> tuple[Any, int]:
    """What Anthropic's clients were told, and how much of it was cached."""
    if events is None:
        reply = json.loads(text)
        usage = reply["usage"]
        (part,) = reply["content"]
        return [part["text"], reply["stop_reason"]], usage["cache_read_input_tokens"]
    usage = events[0]["message"]["usage"]
    deltas = [e["delta"] for e in events if e["type"] in ("content_block_delta", "message_delta")]
    said = "".join(delta.get("text", "") for delta in deltas)
    return [said, deltas[-1]["stop_reason"]], usage["cache_read_input_tokens"]


def _choices(text: str, events: list[Any] | None) -> tuple[Any, int]:
    """What OpenAI's clients were told by choice, and how much of it was cached."""
    found: dict[int, list[Any]] = {}
    replies = [json.loads(text)] if events is None else events
    for reply in replies:
        for choice in reply["choices"]:
            mine = found.setdefault(choice["index"], ["", None])
            part = choice.get("message") or choice.get("delta") or choice
            mine[0] += part.get("content") or part.get("text") or ""
            mine[1] = choice["finish_reason"] or mine[1]
    assert all(finish for _, finish in found.values()), found
    usage = replies[-1]["usage"]
    return sorted(found.items()), usage["prompt_tokens_details"]["cached_tokens"]
