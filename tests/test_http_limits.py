"""Limits over HTTP: the 429, what it says, and that it says nothing of anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import Keys, bearer, open_gate

ASK = {"prompt": [7] * 20, "max_tokens": 4, "ignore_eos": True}


@contextmanager
def serving(
    folder: Path, tenants: dict[str, dict[str, Any]], **settings: Any
) -> Iterator[tuple[RunningServer, Keys]]:
    gate, keys = open_gate(folder, **tenants)
    with running_server(gate=gate, **settings) as server:
        yield server, keys


def complete(server: RunningServer, key: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
    return server.ask("POST", "/v1/completions", ASK | fields, headers=bearer(key))


def hold(client: openai.OpenAI) -> openai.Stream[Any]:
    """Begin an answer that is long enough to run or wait until it is closed."""
    return client.completions.create(
        model="tiny",
        prompt="the",
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def error_of(answer: tuple[int, dict[str, str], Any]) -> dict[str, Any]:
    status, headers, body = answer
    assert status == 429, body
    error: dict[str, Any] = body["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    wait_s = error["limit"]["retry_after_s"]
    assert int(headers["Retry-After"]) >= 1 and int(headers["Retry-After"]) - 1 <= wait_s
    assert error["limit"]["name"] in error["message"]
    assert str(error["limit"]["value"]) in error["message"]
    return error


def test_requests_and_tokens_a_minute_are_limited_and_shown_in_openais_headers(
    tmp_path: Path,
) -> None:
    tenants = {"few": {"requests_per_minute": 3}, "small": {"tokens_per_minute": 50}, "free": {}}
    with serving(tmp_path, tenants) as (server, keys):
        left = []
        for _ in range(3):
            status, headers, _ = complete(server, keys["few"])
            assert status == 200 and headers["x-ratelimit-limit-requests"] == "3"
            left.append(headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        error = error_of(complete(server, keys["few"]))
        assert (error["limit"]["name"], error["limit"]["value"]) == ("requests_per_minute", 3)
        assert server.ask("GET", "/v1/models", headers=bearer(keys["few"]))[0] == 200

        _, headers, _ = complete(server, keys["small"])
        assert int(headers["x-ratelimit-remaining-tokens"]) in (26, 27, 30, 31)
        complete(server, keys["small"])
        error = error_of(complete(server, keys["small"]))
        assert error["limit"]["name"] == "tokens_per_minute"

        status, headers, _ = complete(server, keys["free"])
        assert status == 200
        assert not any(name.lower().startswith("x-ratelimit") for name in headers)


def test_openais_client_raises_its_own_rate_limit_error(tmp_path: Path) -> None:
    with serving(tmp_path, {"few": {"requests_per_minute": 1}}) as (server, keys):
        complete(server, keys["few"])
        with server.client(keys["few"]) as client, pytest.raises(openai.RateLimitError) as e:
            client.completions.create(model="tiny", prompt="the")
        assert e.value.code == "rate_limit_exceeded"


def test_a_list_of_prompts_is_charged_whole_or_not_at_all(tmp_path: Path) -> None:
    with serving(tmp_path, {"small": {"tokens_per_minute": 100}}) as (server, keys):
        assert complete(server, keys["small"])[0] == 200
        error_of(complete(server, keys["small"], prompt=[[7] * 20] * 5))
        server.wait_until(server.at_rest)
        assert server.engine.stats().requests_total == 1, "none of the five was submitted"
        assert complete(server, keys["small"], prompt=[[7] * 20] * 3)[0] == 200


def test_a_prompt_that_cannot_be_run_is_not_charged(tmp_path: Path) -> None:
    with serving(tmp_path, {"small": {"tokens_per_minute": 100}}) as (server, keys):
        for _ in range(3):
            answer = complete(server, keys["small"], prompt=[7] * 60, max_tokens=1_000_000)
            assert answer[0] == 400
        assert complete(server, keys["small"])[0] == 200


def test_the_cap_counts_ones_own_choices_and_one_tenants_flood_refuses_nobody_else(
    tmp_path: Path,
) -> None:
    """Also where the server's whole queue would be full of them."""
    tenants: dict[str, dict[str, Any]] = {
        "loud": {},
        "quiet": {},
        "capped": {"max_concurrent": 1, "max_queued": 1},
    }
    with serving(tmp_path, tenants, max_num_seqs=4, max_queue=8) as (server, keys):
        with server.client(keys["loud"]) as client:
            held, refusals = [], []
            for _ in range(8):
                try:
                    held.append(hold(client))
                except openai.RateLimitError as e:
                    refusals.append(e)
            assert len(held) == 4 and len(refusals) == 4, "its share of 12 by weight"
            assert "4 of your choices run or wait, and 4 may" in str(refusals[0])
            for stream in held:
                stream.close()
            server.wait_until(server.at_rest)
            quiet = complete(server, keys["quiet"])
            assert quiet[0] == 200

        with server.client(keys["capped"]) as client:
            held = [hold(client) for _ in range(2)]
            error = error_of(complete(server, keys["capped"]))
            assert (error["limit"]["name"], error["limit"]["value"]) == ("max_queued", 1)
            answer = complete(server, keys["capped"], n=2, seed=1)
            assert answer[0] == 400 and "max_concurrent is 1" in answer[2]["error"]["message"]
            for stream in held:
                stream.close()
        server.wait_until(server.at_rest)


def test_a_full_server_does_not_tell_how_full_and_of_whom(tmp_path: Path) -> None:
    tenants: dict[str, dict[str, Any]] = {
        "loud": {"max_queued": 100},
        "quiet": {},
    }
    with serving(tmp_path, tenants, max_num_seqs=1, max_queue=1) as (server, keys):
        with server.client(keys["loud"]) as client:
            held = [hold(client) for _ in range(2)]
            status, headers, body = complete(server, keys["quiet"])
            for stream in held:
                stream.close()
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert body["error"]["message"] == "The server is busy; try again later."
        assert headers["Retry-After"] == "1" and "limit" not in body["error"]


def test_refusals_are_counted_by_limit(tmp_path: Path) -> None:
    tenants: dict[str, dict[str, Any]] = {
        "few": {"requests_per_minute": 1},
        "root": {"role": "admin"},
    }
    with serving(tmp_path, tenants) as (server, keys):
        for _ in range(3):
            complete(server, keys["few"])
        text = server.ask("GET", "/metrics", headers=bearer(keys["root"]))[2]
        assert 'radixkv:tenant_refused_total{limit="requests_per_minute",tenant="few"} 2.0' in text
