"""Whatever the description of the service allows, and much that it does not, is sent to it.

No answer may be a bug's, none may have a form that the description does not have, and when it is
over nothing is held but pins.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.hostile_client import come_to_rest
from tests.http_server import RunningServer, running_server
from tests.tenant_files import bearer, open_gate

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ENDLESS = "/v1/cache/events"
"""Answers until its client goes; asked apart from the others."""
CASES = 6
"""Of one route in one round."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello you"}]}
LINE = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": "the system", "max_tokens": 3},
    }
)
GOOD: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": 4},
    "/v1/completions": {"prompt": "the system", "max_tokens": 4},
    "/v1/messages": CHAT | {"max_tokens": 4, "model": "tiny"},
    "/v1/messages/count_tokens": CHAT | {"model": "tiny"},
    "/v1/load_lora_adapter": {"lora_name": "one", "lora_path": "one"},
    "/v1/unload_lora_adapter": {"lora_name": "one"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [3, 4, 5]},
    "/v1/cache/pin": {"tokens": list(range(3, 40))},
    "/v1/cache/unpin": {"name": "mine"},
    "/v1/cache/prewarm": CHAT,
    "/v1/cache/explain": CHAT,
    "/v1/cache/public": {"prompt": "the assistant is"},
    "/v1/files": {"purpose": "batch", "file": LINE.encode()},
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
}
"""Bodies that are served: most of those that are drawn are not, so parts of them go into these."""
NOT_THERE = {"/v1/load_lora_adapter": 403, "/v1/unload_lora_adapter": 404, "/v1/cache/unpin": 404}
"""What a good body is answered where it names what this server has not."""
Callers = Mapping[str, Mapping[str, str]]


class Sweep:
    """Rounds over all routes, as callers drawn by chance."""

    def __init__(
        self, server: RunningServer, callers: Callers, good: Mapping[str, dict[str, Any]]
    ) -> None:
        self._server = server
        self._good = good
        self._callers = callers
        self._session = requests.Session()
        own = next(iter(callers.values()))
        url = f"{server.url}/openapi.json"
        document = self._session.get(url, headers=own, timeout=20).json()
        assert set(good) < set(document["paths"])
        del document["paths"][ENDLESS]
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.url)
        self._operations = [
            found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)
        ]
        assert len(self._operations) == sum(map(len, document["paths"].values()))

    def run(self, seconds: float) -> None:
        """Go round until the time is up, and once in any case."""
        end_s, number = time.monotonic() + seconds, 0
        while number == 0 or time.monotonic() < end_s:
            for operation in self._operations:
                self._probe(operation, number)
            self._listen()
            number += 1

    def _probe(self, operation: Any, number: int) -> None:
        has_body = operation.path in self._good and operation.method.upper() == "POST"
        breaks = number % 3 == 2 and has_body
        mode = GenerationMode.NEGATIVE if breaks else GenerationMode.POSITIVE

        @seed(number)
        @settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=operation.as_strategy(generation_mode=mode),
            caller=st.sampled_from([*self._callers, *["admin"] * 6]),
            data=st.data(),
        )
        def send(case: Any, caller: str, data: st.DataObject) -> None:
            if has_body and isinstance(case.body, dict) and data.draw(st.integers(0, 3)):
                drawn = sorted(case.body, key=str)
                picked = data.draw(st.lists(st.sampled_from(drawn), max_size=2)) if drawn else []
                case.body = self._good[operation.path] | {n: case.body[n] for n in picked}
            reply = case.call(
                session=self._session, headers=dict(self._callers[caller]), timeout=60
            )
            case.validate_response(reply, checks=CHECKS)

        send()
        assert self._server.engine.alive, f"the engine died of {operation.label}"

    def _listen(self) -> None:
        for headers in self._callers.values():
            for query in ("", "?window=1", "?%00"):
                url = f"{self._server.url}{ENDLESS}{query}"
                with self._session.get(url, headers=headers, stream=True, timeout=20) as reply:
                    assert reply.status_code in (200, 400, 401), reply.text


@pytest.fixture(params=["keyless", "keyed"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Callers]]:
    """A server, and who calls: on one without keys anybody, else an admin, a user, strangers."""
    gate = None
    callers: dict[str, Mapping[str, str]] = {"admin": {}}
    if request.param == "keyed":
        gate, keys = open_gate(tmp_path, admin={"role": "admin"}, user={"max_concurrent": 4})
        callers |= {name: bearer(key) for name, key in keys.items()} | {
            "stranger": bearer("rk-nobody"),
            "nameless": {},
        }
    settings: dict[str, Any] = {"max_model_len": 192, "kv_memory": "1MiB"}
    with running_server(gate=gate, batch_dir=tmp_path / "batches", **settings) as server:
        yield server, callers


def sweep(server: RunningServer, callers: Callers, seconds: float) -> None:
    """Sweep, and see that nothing is left behind."""
    good = {**GOOD}
    for path, body in GOOD.items():
        if path == "/v1/files":
            form: Any = {"files": {"file": body["file"]}, "data": {"purpose": body["purpose"]}}
            url = f"{server.url}{path}"
            reply = requests.post(url, headers=dict(callers["admin"]), timeout=20, **form)
            assert reply.status_code == 200, reply.text
            good["/v1/batches"] = GOOD["/v1/batches"] | {"input_file_id": reply.json()["id"]}
            continue
        status = server.ask("POST", path, good[path], headers=callers["admin"])[0]
        assert status == NOT_THERE.get(path, 200), path
    Sweep(server, callers, good).run(seconds)
    come_to_rest(server, callers["admin"])


def test_no_case_drawn_from_the_description_breaks_the_service(
    service: tuple[RunningServer, Callers],
) -> None:
    """ERRORS-1: one short round; minutes of it are a soak test."""
    sweep(*service, seconds=4)


@pytest.mark.soak
def test_no_case_breaks_the_service_in_minutes(service: tuple[RunningServer, Callers]) -> None:
    """Five minutes in all."""
    sweep(*service, seconds=150)
