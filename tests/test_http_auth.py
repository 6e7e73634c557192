"""Keys over HTTP: who is let in, as whom, to which routes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import openai
import pytest

from radixkv.errors import InvalidConfig
from radixkv.service.engine.origin import Origin
from radixkv.service.http.auth import OPEN_PATHS, Gate
from radixkv.service.http.openapi_routes import ROUTES
from radixkv.service.http.server import HttpServer, bind, run_server
from radixkv.service.http.serving import Serving
from radixkv.service.tenants_edit import add_tenant, remove_tenant, rotate_key
from radixkv.service.tenants_file import TenantsFile
from tests.http_server import RunningServer, build_engine, running_server
from tests.tenant_files import Keys, bearer, open_gate, write_tenants

ADMIN_ROUTES = {("post", "/v1/cache/reset"), ("post", "/reset_prefix_cache"), ("get", "/metrics")}
"""Of those there are, some that nobody else may call."""


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gate, Keys]:
    folder = tmp_path_factory.mktemp("tenants")
    return open_gate(folder, acme={}, bravo={}, root={"role": "admin"})


@pytest.fixture(scope="module")
def keys(tenants: tuple[Gate, Keys]) -> Keys:
    return tenants[1]


@pytest.fixture(scope="module")
def server(tenants: tuple[Gate, Keys]) -> Iterator[RunningServer]:
    with running_server(gate=tenants[0]) as server:
        yield server


def concrete(path: str) -> str:
    return path.replace("{model}", "tiny").replace("{", "").replace("}", "")


def status(server: RunningServer, method: str, path: str, **headers: str) -> int:
    return server.ask(method.upper(), concrete(path), headers=headers)[0]


def test_nothing_but_health_and_version_answers_without_a_key(server: RunningServer) -> None:
    """SECURITY-6: whatever route there is, and whatever will be."""
    for route in ROUTES:
        wanted = 200 if route.path in OPEN_PATHS else 401
        assert status(server, route.method, route.path) == wanted, route.path
    assert status(server, "get", "/no/such/route") == 401
    assert len(OPEN_PATHS) < len(ROUTES)


def test_admin_routes_are_closed_to_users_and_open_to_admins(
    server: RunningServer, keys: Keys
) -> None:
    """SECURITY-6"""
    assert {(route.method, route.path) for route in ROUTES} >= ADMIN_ROUTES
    for method, path in ADMIN_ROUTES:
        answer = server.ask(method.upper(), path, headers=bearer(keys["acme"]))
        assert answer[0] == 403 and answer[2]["error"]["code"] == "admin_required", path
        assert status(server, method, path, **bearer(keys["root"])) == 200, path


def test_a_401_has_openais_shape_and_says_how_to_send_a_key(server: RunningServer) -> None:
    code, headers, body = server.ask("GET", "/v1/models")
    assert (code, body["error"]["type"]) == (401, "authentication_error")
    assert "Authorization: Bearer" in body["error"]["message"]
    assert headers["WWW-Authenticate"].startswith("Bearer")
    wrong = server.ask("GET", "/v1/models", headers=bearer("rk-00000000-wrong"))
    assert (wrong[0], wrong[2]["error"]["code"]) == (401, "invalid_api_key")
    assert "rk-00000000" not in str(wrong), "a key, even a wrong one, is not repeated"


def test_a_key_comes_in_either_header(server: RunningServer, keys: Keys) -> None:
    for headers in (
        bearer(keys["acme"]),
        {"Authorization": f"bearer  {keys['acme']} "},
        {"x-api-key": keys["acme"]},
        {"X-API-Key": keys["acme"], "Authorization": "Basic eDp5"},
    ):
        assert server.ask("GET", "/v1/models", headers=headers)[0] == 200, headers
    for headers in ({"Authorization": keys["acme"]}, {"Authorization": "Bearer"}, {"x-api-key": ""},
                    bearer(keys["acme"][:-1]), bearer(keys["acme"] + "A")):  # fmt: skip
        assert server.ask("GET", "/v1/models", headers=headers)[0] == 401, headers


def test_openais_client_works_with_a_key_and_fails_without(
    server: RunningServer, keys: Keys
) -> None:
    with server.client(keys["acme"]) as client:
        reply = client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        assert reply.usage is not None and reply.usage.completion_tokens == 1
    with server.client("rk-no") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_engine_is_told_the_tenant_of_the_key_whatever_the_body_says(
    server: RunningServer, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY-3"""
    seen: list[Origin] = []
    submit = server.engine.submit

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["origin"])
        return submit(*args, **kwargs)

    monkeypatch.setattr(server.engine, "submit", spy)
    body = {"prompt": "hello", "max_tokens": 1, "user": "bravo", "tenant": "bravo",
            "prompt_cache_key": "bravo", "cache_salt": "bravo"}  # fmt: skip
    headers = bearer(keys["acme"]) | {"X-Tenant": "bravo", "X-Request-Id": "bravo"}
    assert server.ask("POST", "/v1/completions", body, headers=headers)[0] == 200
    assert server.ask("POST", "/v1/completions", body, headers=bearer(keys["bravo"]))[0] == 200
    assert [origin.tenant for origin in seen] == ["acme", "bravo"]
    assert seen[0].namespace != seen[1].namespace


def test_load_shows_a_user_only_its_own(server: RunningServer, keys: Keys) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 3000, "stream": True}
    with server.client(keys["acme"]) as client:
        stream = client.completions.create(**body, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
        next(iter(stream))
        loads = {
            name: server.ask("GET", "/load", headers=bearer(key))[2]["server_load"]
            for name, key in keys.items()
        }
        stream.close()
    assert loads == {"acme": 1, "bravo": 0, "root": 1}
    server.wait_until(server.at_rest)


def test_the_log_names_the_tenant_and_never_the_key(
    server: RunningServer, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    server.ask("GET", "/v1/models", headers=bearer(keys["acme"]))
    server.ask("GET", "/v1/models", headers=bearer("rk-11111111-secret"))
    good, bad = (r.__dict__["fields"] for r in caplog.records if r.name == "radixkv.http")
    assert good["tenant"] == "acme" and bad["tenant"] is None
    assert not any(keys["acme"][12:] in str(r.__dict__) for r in caplog.records)
    assert not any("11111111" in str(r.__dict__) for r in caplog.records)


def test_a_keyed_server_answers_to_any_name_and_a_keyless_one_to_loopback_only(
    server: RunningServer, keys: Keys
) -> None:
    """A page whose name was made to point here (DNS rebinding) has no key."""
    headers = {"Host": "models.example"}
    assert server.ask("GET", "/v1/models", headers=headers)[0] == 401
    assert server.ask("GET", "/v1/models", headers=headers | bearer(keys["acme"]))[0] == 200
    with running_server() as keyless:
        assert keyless.ask("GET", "/v1/models", headers=headers)[0] == 403
        assert keyless.ask("GET", "/v1/models", headers=bearer("anything"))[0] == 200
        assert keyless.ask("POST", "/v1/cache/reset")[0] == 200, "the local tenant is an admin"


def test_tenants_are_counted_apart_and_only_where_there_are_keys(
    server: RunningServer, keys: Keys
) -> None:
    body = {"prompt": "the user is in the system " * 4, "max_tokens": 3, "ignore_eos": True}
    for _ in range(2):
        server.ask("POST", "/v1/completions", body, headers=bearer(keys["bravo"]))
    text = server.ask("GET", "/metrics", headers=bearer(keys["root"]))[2]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'tenant="bravo"' in line)
    assert float(lines['radixkv:tenant_generation_tokens_total{tenant="bravo"}']) >= 6
    assert float(lines['radixkv:tenant_prompt_tokens_cached_total{tenant="bravo"}']) > 0
    assert float(lines['radixkv:tenant_requests_total{tenant="bravo"}']) >= 2
    with running_server() as keyless:
        assert "tenant=" not in keyless.ask("GET", "/metrics")[2]


def test_metrics_can_be_left_open_for_a_scraper(tmp_path: Path) -> None:
    file, _ = write_tenants(tmp_path, acme={})
    with running_server(gate=Gate(TenantsFile(file), open_metrics=True)) as server:
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.ask("GET", "/v1/cache/stats")[0] == 401


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_running_server_follows_the_file(tmp_path: Path) -> None:
    file, keys = write_tenants(tmp_path, acme={}, root={"role": "admin"})
    clock = Clock()
    gate = Gate(TenantsFile(file, clock=clock))
    with running_server(gate=gate) as server:

        def code(key: str) -> int:
            clock.now += 1
            return server.ask("GET", "/v1/models", headers=bearer(key))[0]

        late = add_tenant(file, "late", {})
        assert code(late) == 200
        fresh = rotate_key(file, "acme", timedelta(hours=1))
        assert (code(keys["acme"]), code(fresh)) == (200, 200)
        rotate_key(file, "acme", timedelta(0))
        assert (code(keys["acme"]), code(fresh)) == (401, 401)
        remove_tenant(file, "late")
        assert code(late) == 401
        file.write_text("[broken")
        assert code(keys["root"]) == 200


def test_floors_that_do_not_fit_are_refused_at_start_and_ignored_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, keys = write_tenants(tmp_path, acme={"cache_floor": "90%"})
    clock = Clock()
    with running_server(gate=Gate(TenantsFile(file, clock=clock))) as server:
        add_tenant(file, "greedy", {"cache_floor": "1GiB"})
        clock.now += 1
        assert server.ask("GET", "/v1/models", headers=bearer(keys["acme"]))[0] == 200
        assert "greedy" not in server.serving.gate.roster
        assert any("more --kv-memory" in r.getMessage() for r in caplog.records)
    with build_engine() as engine, pytest.raises(InvalidConfig, match="the pool has"):
        Serving(gate=Gate(TenantsFile(file))).start(engine)


async def test_a_hangup_reads_the_file_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixkv.tenants")
    file, _ = write_tenants(tmp_path, acme={})
    gate = Gate(TenantsFile(file, clock=lambda: 0.0))
    server = HttpServer(Serving(gate=gate), bind("127.0.0.1", 0), max_body=2**20)
    ready = asyncio.Event()
    with build_engine() as engine:
        running = asyncio.create_task(
            run_server(
                server,
                lambda: engine,
                shutdown_timeout_s=1,
                ready=lambda _: ready.set(),
                stopping=lambda _: None,
            )
        )
        await ready.wait()
        add_tenant(file, "late", {})
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while "late" not in gate.roster:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
