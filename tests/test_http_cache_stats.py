"""GET /v1/cache/stats: windows with their denominators, unknown as null, each tenant its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import Keys, bearer, open_gate

TEXT = "the user is in the system and the assistant is to answer. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Keys]]:
    """A server of two tenants and an admin, after each of the two has asked something."""
    folder: Path = tmp_path_factory.mktemp("tenants")
    gate, keys = open_gate(folder, alice={}, bob={}, root={"role": "admin"})
    with running_server(gate=gate) as server:
        for who, times in (("alice", 3), ("bob", 1)):
            for _ in range(times):
                complete(server, TEXT, headers=bearer(keys[who]), prompt_cache_key=f"{who}-label")
        server.wait_until(server.at_rest)
        yield server, keys


def complete(
    server: RunningServer, prompt: str, headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, int]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
    status, _, reply = server.ask("POST", "/v1/completions", body, headers=headers or {})
    assert status == 200, reply
    usage: dict[str, int] = reply["usage"]
    return usage | {"cached_tokens": reply["usage"]["prompt_tokens_details"]["cached_tokens"]}


def stats(server: RunningServer, query: str = "", headers: dict[str, str] | None = None) -> Any:
    status, _, reply = server.ask("GET", f"/v1/cache/stats{query}", headers=headers or {})
    assert status == 200, reply
    return reply


def test_a_window_states_its_interval_and_denominator(server: RunningServer) -> None:
    """METRICS-5: hits and queries in tokens, over a named time, by tenant."""
    began = time.time()
    usages = [complete(server, TEXT, prompt_cache_key="k") for _ in range(3)]
    server.wait_until(server.at_rest)
    window = stats(server, "?window=5m&by=tenant")["window"]
    (row,) = window["rows"]
    assert row["tenant"] == "local"
    assert window["denominator"] == "queried_tokens"
    assert window["asked_s"] == 300 and 0 < window["interval_s"] <= 300
    assert window["to_time"] - window["from_time"] == pytest.approx(window["interval_s"], abs=0.01)
    assert began - 60 < window["from_time"] <= window["to_time"] < time.time() + 1
    tokens = row["tokens"]
    assert tokens["queried"] == sum(u["prompt_tokens"] for u in usages)
    assert tokens["hit"]["device"] == sum(u["cached_tokens"] for u in usages)
    assert tokens["computed"] == tokens["queried"] - tokens["hit"]["device"]
    assert tokens["generated"] == sum(u["completion_tokens"] for u in usages)
    assert row["hit_rate"] == pytest.approx(tokens["hit"]["device"] / tokens["queried"], abs=1e-6)
    assert row["requests"] == 3
    by_key = stats(server, "?by=prompt_cache_key")["window"]["rows"]
    assert [(r["prompt_cache_key"], r["tokens"]["queried"]) for r in by_key] == [
        ("k", tokens["queried"])
    ]
    (by_identity,) = stats(server, "?by=identity&window=60")["window"]["rows"]
    assert len(by_identity["identity"]) == 32 and by_identity["evictions"] is None


def test_what_is_unknown_is_null_and_not_zero(server: RunningServer) -> None:
    """METRICS-6."""
    with running_server() as fresh:
        reply = stats(fresh, "?window=1m")
        assert reply["hit_rate"] is None
        assert reply["window"]["rows"] == [] or reply["window"]["rows"][0]["hit_rate"] is None
        assert reply["residency"] is None or reply["residency"]["block_lifetime_s"]["p50"] is None
    complete(server, TEXT)
    row = stats(server, "?window=1m")["window"]["rows"][0]
    assert row["tokens"]["hit"]["host"] is None, "there is no such tier"
    assert stats(server)["window"] is None, "not asked for"


def test_a_write_counts_in_the_denominator(server: RunningServer) -> None:
    """METRICS-6: rate = read / (read + written + neither), for two turns of one chat."""
    with running_server() as fresh:
        first, second = complete(fresh, TEXT), complete(fresh, TEXT)
        fresh.wait_until(fresh.at_rest)
        (row,) = stats(fresh, "?window=1m")["window"]["rows"]
        queried = first["prompt_tokens"] + second["prompt_tokens"]
        assert row["hit_rate"] == pytest.approx(second["cached_tokens"] / queried, abs=1e-6)


def test_todays_fields_and_waste_agree_with_each_other(server: RunningServer) -> None:
    complete(server, TEXT)
    server.wait_until(server.at_rest)
    reply = stats(server, "?window=1m")
    blocks = reply["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["used"] == blocks["total"]
    assert blocks["resident"] == blocks["cached"] and blocks["pinned"] == 0
    assert reply["tokens"]["hit"] <= reply["tokens"]["queried"]
    waste = reply["waste"]
    assert waste["reserved_tokens"] == 0
    assert 0 <= waste["tail_tokens"] < blocks["resident"] * reply["block_size"]
    assert waste["metadata_bytes"] > 100
    assert reply["scope"] == "server" and reply["queue"] is not None


def test_evictions_are_told_by_who_suffered_and_who_caused_them() -> None:
    with running_server(kv_memory="64KiB", max_model_len=160) as small:
        for i in range(8):
            complete(small, f"{i} " + TEXT[:100])
        small.wait_until(small.at_rest)
        reply = stats(small, "?window=1m")
        (row,) = reply["window"]["rows"]
        assert row["evictions"]["suffered"] == row["evictions"]["caused"] > 0
        assert reply["events"]["evicted"] == row["evictions"]["suffered"]


def test_a_tenant_sees_its_own_numbers_alone(shared: tuple[RunningServer, Keys]) -> None:
    """SECURITY-5."""
    server, keys = shared
    prompt_tokens = len(server.engine.tokenize(TEXT))
    alice = stats(server, "?window=5m&by=prompt_cache_key", bearer(keys["alice"]))
    bob = stats(server, "?window=5m&by=prompt_cache_key", bearer(keys["bob"]))
    assert (alice["scope"], alice["tenant"]) == ("tenant", "alice")
    assert alice["tokens"]["queried"] == 3 * prompt_tokens
    assert bob["tokens"]["queried"] == prompt_tokens and bob["tokens"]["hit"] == 0
    for reply, name in ((alice, "alice"), (bob, "bob")):
        assert {row["tenant"] for row in reply["window"]["rows"]} == {name}
        assert {row["prompt_cache_key"] for row in reply["window"]["rows"]} == {f"{name}-label"}
        assert reply["blocks"]["total"] is None and reply["blocks"]["free"] is None
        assert reply["nodes"] is None and reply["identities"] is None
        assert reply["waste"] is None and reply["residency"] is None
        assert {row["tenant"] for row in reply["queue"]} <= {name}
    assert "alice" not in str(bob)
    silent = stats(server, "", bearer(keys["bob"]))
    assert silent["window"] is None and silent["tokens"]["queried"] == prompt_tokens


def test_an_admin_sees_every_tenant(shared: tuple[RunningServer, Keys]) -> None:
    server, keys = shared
    reply = stats(server, "?window=5m&by=tenant", bearer(keys["root"]))
    assert reply["scope"] == "server" and reply["blocks"]["total"] > 0
    rows = {row["tenant"]: row for row in reply["window"]["rows"]}
    assert rows["alice"]["requests"] == 3 and rows["bob"]["requests"] == 1
    total = sum(row["tokens"]["queried"] for row in rows.values())
    assert total == reply["tokens"]["queried"], "the parts add up to the whole"


@pytest.mark.parametrize(
    "query, param",
    [
        ("?window=", "window"),
        ("?window=0s", "window"),
        ("?window=7h", "window"),
        ("?window=5x", "window"),
        ("?window=1e3", "window"),
        ("?by=text", "by"),
        ("?window=5m&window=6m", "window"),
        ("?nonsense=1", "nonsense"),
    ],
)
def test_a_bad_query_is_a_400_that_names_it(server: RunningServer, query: str, param: str) -> None:
    status, _, reply = server.ask("GET", f"/v1/cache/stats{query}")
    assert status == 400 and reply["error"]["param"] == param


def test_every_queried_token_is_hit_or_missed_for_a_reason(server: RunningServer) -> None:
    """METRICS-4: what was not found says why, and the account adds up."""
    prompt = "hello, why is it that the assistant is in the system? " * 4
    for text in (prompt, prompt, prompt + "and more", "something else"):
        server.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 1})
    window = server.ask("GET", "/v1/cache/stats?window=5m&by=tenant")[2]["window"]
    for row in window["rows"]:
        missed = row["missed"]
        assert sum(missed.values()) == row["tokens"]["queried"] - row["tokens"]["hit"]["device"]
    reasons = set().union(*(row["missed"] for row in window["rows"]))
    assert {"first_seen", "last_token"} <= reasons or "diverged" in reasons
    by_key = server.ask("GET", "/v1/cache/stats?window=5m&by=prompt_cache_key")[2]["window"]
    assert all(row["missed"] is None for row in by_key["rows"])
    assert all(row["tokens"]["lost_at_a_border"] is None for row in by_key["rows"])
    for row in window["rows"]:
        assert row["tokens"]["lost_at_a_border"] == row["missed"].get("below_block", 0)
