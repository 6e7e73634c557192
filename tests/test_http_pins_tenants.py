"""Pins of several tenants: each has its own, sees its own, and cannot tell what others have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_server import RunningServer, running_server
from tests.tenant_files import Keys, bearer, open_gate

BLOCK = 16


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningServer, Keys]]:
    """64 blocks of which 16 may be pinned: 2 by acme, 6 by bravo, 8 by the admin."""
    gate, keys = open_gate(
        tmp_path_factory.mktemp("tenants"),
        acme={"weight": 1},
        bravo={"weight": 3},
        root={"role": "admin", "weight": 4},
    )
    small: dict[str, Any] = {"kv_memory": "512KiB", "max_model_len": 512}
    with running_server(gate=gate, **small) as server:
        yield server, keys


class As:
    """Asks with one tenant's key."""

    def __init__(self, started: tuple[RunningServer, Keys], tenant: str) -> None:
        self._server, keys = started
        self._headers = bearer(keys[tenant])

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, _, reply = self._server.ask("POST", path, body, headers=self._headers)
        return status, reply

    def pin(self, tokens: list[int], name: str | None = None) -> tuple[int, Any]:
        body = {"tokens": tokens} | ({"name": name} if name else {})
        return self.post("/v1/cache/pin", body)

    def unpin(self, **which: str) -> tuple[int, Any]:
        return self.post("/v1/cache/unpin", which)

    def pins(self) -> Any:
        status, _, reply = self._server.ask("GET", "/v1/cache/pins", headers=self._headers)
        assert status == 200, reply
        return reply


@pytest.fixture
def acme(started: tuple[RunningServer, Keys]) -> Iterator[As]:
    yield As(started, "acme")
    root = As(started, "root")
    for pin in root.pins()["data"]:
        assert root.unpin(id=pin["id"])[0] == 200


@pytest.fixture
def bravo(started: tuple[RunningServer, Keys]) -> As:
    return As(started, "bravo")


@pytest.fixture
def root(started: tuple[RunningServer, Keys]) -> As:
    return As(started, "root")


def words(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(num_tokens)]


def test_a_grant_and_its_answer_are_the_same_whatever_others_have_pinned(
    acme: As, bravo: As, root: As
) -> None:
    """SECURITY-1: a budget is no window to look at others through."""
    prompt = words(100, 1)
    answers = []
    for others in (0, 1):
        if others:
            assert bravo.pin(words(100, 2))[1]["pinned_tokens"] == 6 * BLOCK
            assert root.pin(words(128, 3))[1]["pinned_tokens"] == 8 * BLOCK
            assert bravo.pin(prompt)[0] == 409
        status, reply = acme.pin(prompt, "mine")
        assert (status, reply["pinned_tokens"]) == (200, 2 * BLOCK)
        assert acme.unpin(name="mine")[0] == 200
        del reply["id"], reply["cached_tokens"]  # its own first answer left the prompt cached
        answers.append((reply, acme.pins()))
    assert answers[0] == answers[1]


def test_nobody_sees_or_lets_go_what_is_anothers(acme: As, bravo: As) -> None:
    """SECURITY-6"""
    (status, pinned) = acme.pin(words(30, 4), "the secret plan")
    assert status == 200
    assert bravo.pins() == {
        "object": "list",
        "data": [],
        "budget": {"blocks": 6, "used_blocks": 0},
    }
    for which in ({"id": pinned["id"]}, {"name": "the secret plan"}):
        assert bravo.unpin(**which)[0] == 404
        unknown = {key: value + "x" for key, value in which.items()}
        assert bravo.unpin(**which)[1]["error"] == bravo.unpin(**unknown)[1]["error"]
    assert [pin["name"] for pin in acme.pins()["data"]] == ["the secret plan"]
    assert "tenant" not in acme.pins()["data"][0]


def test_an_admin_sees_all_without_their_words_and_may_let_go(acme: As, root: As) -> None:
    acme.pin(words(30, 5), "the secret plan")
    root.pin(words(30, 6), "my own")
    shown = {pin["tenant"]: pin for pin in root.pins()["data"]}
    assert (shown["acme"]["name"], shown["root"]["name"]) == (None, "my own")
    assert root.unpin(name="the secret plan")[0] == 404, "a name is its tenant's own"
    assert root.unpin(id=shown["acme"]["id"]) == (
        200,
        {"object": "cache.unpin", "ids": [shown["acme"]["id"]]},
    )
    assert acme.pins()["data"] == []


def test_a_key_is_asked_for_in_the_form_of_the_route(
    started: tuple[RunningServer, Keys],
) -> None:
    server, keys = started
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    status, _, reply = server.ask("POST", "/v1/messages", body)
    assert (status, reply["type"]) == (401, "error")
    assert reply["error"]["type"] == "authentication_error"
    headers = {"x-api-key": keys["acme"], "anthropic-version": "2023-06-01"}
    assert server.ask("POST", "/v1/messages", body, headers=headers)[0] == 200
