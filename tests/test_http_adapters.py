"""Adapters over HTTP: ids, the list of models, loading by admins from one directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.adapter_cases import own_answer, save_adapter
from tests.http_server import RunningServer, running_server

GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def own(folder: Path) -> dict[str, Any]:
    """PEFT's models of the adapters ``one`` and ``two``."""
    return {n: save_adapter(folder / n, seed=i) for i, n in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def server(folder: Path, own: dict[str, Any]) -> Iterator[RunningServer]:
    with running_server(adapter=(f"sql={folder / 'one'}",)) as server:
        server.serving.adapter_dir = folder
        yield server


def _load(server: RunningServer, name: str, path: str, **more: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": path} | more
    status, _, reply = server.ask("POST", "/v1/load_lora_adapter", body)
    return status, reply


def _complete(server: RunningServer, model: str, **more: Any) -> tuple[int, list[int], list[int]]:
    """Cached tokens, ids and prompt ids of a greedy answer."""
    body = GREEDY | {"model": model, "prompt": "hello you and the user " * 8} | more
    status, _, reply = server.ask("POST", "/v1/completions", body)
    assert status == 200, reply
    assert reply["model"] == model
    (choice,) = reply["choices"]
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, choice["token_ids"], choice["prompt_token_ids"]


def test_an_adapter_is_a_model_id_and_answers_as_peft_does(
    server: RunningServer, own: dict[str, Any]
) -> None:
    """IDENTITY-1 over HTTP: each id's first use hits nothing, its second use all but one token."""
    _, base, prompt = _complete(server, "tiny")
    cached, answer, _ = _complete(server, "tiny:sql")
    assert cached == 0 and answer != base
    assert answer == own_answer(own["one"], prompt, 6)
    assert _complete(server, "tiny:sql")[:2] == (len(prompt) - 1, answer)
    assert _complete(server, "tiny")[:2] == (len(prompt) - 1, base)
    salted = _complete(server, "tiny", cache_salt="sql")
    assert salted[:2] == (0, base), "HASH-4"


def test_chat_streams_and_token_routes_take_the_id(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with server.client() as client:
        whole = client.chat.completions.create(
            model="tiny:sql",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=5,
            temperature=0,
        )
        assert whole.model == "tiny:sql"
    body = {"model": "tiny:sql", "messages": messages, "max_tokens": 5, "temperature": 0}
    events = server.events("/v1/chat/completions", body)
    assert {event["model"] for event in events[:-1]} == {"tiny:sql"}
    text = "".join(c["delta"].get("content", "") for e in events[:-1] for c in e["choices"])
    assert text == whole.choices[0].message.content
    assert server.ask("POST", "/tokenize", {"model": "tiny:sql", "prompt": "a"})[0] == 200


def test_the_list_of_models_says_whose_adapter_it_is(server: RunningServer) -> None:
    cards = {card["id"]: card for card in server.ask("GET", "/v1/models")[2]["data"]}
    assert list(cards)[0] == "tiny" and cards["tiny"]["parent"] is None
    assert (cards["tiny:sql"]["parent"], cards["tiny:sql"]["root"]) == ("tiny", "tiny:sql")
    assert server.ask("GET", "/v1/models/tiny:sql")[2] == cards["tiny:sql"]
    assert str(server.serving.adapter_dir) not in str(cards)


@pytest.mark.parametrize("model", ["tiny:", "tiny:no", "sql", ":sql", "tiny:sql:", "default:sql"])
def test_an_id_that_is_not_served_is_a_404(server: RunningServer, model: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        status, _, reply = server.ask("POST", path, body | {"model": model})
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert reply["error"]["param"] == "model"
    assert server.ask("GET", f"/v1/models/{model}")[0] == 404


def test_an_admin_loads_replaces_and_unloads(server: RunningServer, own: dict[str, Any]) -> None:
    """IDENTITY-2 over HTTP: the name stays, the weights change, and nothing old is hit."""
    status, card = _load(server, "x", "one")
    assert (status, card["id"], card["parent"]) == (200, "tiny:x", "tiny")
    _, first, prompt = _complete(server, "tiny:x")
    assert first == own_answer(own["one"], prompt, 6)
    status, reply = _load(server, "x", "two")
    assert (status, reply["error"]["code"]) == (400, "invalid_adapter")
    assert "loaded already" in reply["error"]["message"]
    status, _ = _load(server, "x", "two", load_inplace=True)
    assert status == 200
    assert _complete(server, "tiny:x")[:2] == (0, own_answer(own["two"], prompt, 6))
    unload = ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"})
    status, _, reply = server.ask(*unload)
    assert (status, reply) == (200, {"id": "tiny:x", "object": "model", "deleted": True})
    assert server.ask(*unload)[0] == 404
    assert server.ask("GET", "/v1/models/tiny:x")[0] == 404


def test_only_directories_beneath_the_operators_own_are_read(
    server: RunningServer, folder: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    """SECURITY-6: neither paths nor links lead out, and a refusal does not say what is there."""
    outside = Path(shutil.copytree(folder / "one", tmp_path / "outside"))
    (folder / "link").symlink_to(outside)
    shutil.copytree(folder / "one", folder / "linked")
    (folder / "linked" / "adapter_model.safetensors").unlink()
    (folder / "linked" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    refused = {
        str(_load(server, "y", path))
        for path in (
            str(outside), str(tmp_path / "nothing"), "../outside", "link", "linked", ".", "one/..",
            "/", "/etc/passwd", "one\0", f"{folder}-other",
        )
    }  # fmt: skip
    assert len(refused) == 1 and "(403" in refused.pop()
    status, reply = _load(server, "y", "nothing")
    assert (status, reply["error"]["code"]) == (404, "not_found")
    assert _load(server, "y", str(folder / "two"))[0] == 200
    assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "y"})[0] == 200
    kept, server.serving.adapter_dir = server.serving.adapter_dir, None
    status, reply = _load(server, "y", "one")
    server.serving.adapter_dir = kept
    assert status == 403 and "--adapter-dir" in reply["error"]["message"]


def test_web_pages_and_bad_bodies_load_nothing(server: RunningServer) -> None:
    """SECURITY-6"""
    path, good = "/v1/load_lora_adapter", {"lora_name": "z", "lora_path": "one"}
    page = {"Origin": "https://evil.example"}
    assert server.ask("POST", path, good, headers=page)[0] == 403
    assert server.ask("POST", path, data="{}", headers={"Content-Type": "text/plain"})[0] == 415
    for change in ({"lora_name": 5}, {"lora_name": "a/b"}, {"lora_path": ""}, {"scale": 2}):
        status, _, reply = server.ask("POST", path, good | change)
        assert status == 400, reply
    assert server.ask("GET", "/v1/models/tiny:z")[0] == 404


def test_routers_are_told_which_adapters_are_asked_for(server: RunningServer) -> None:
    """In vLLM's form, as gateways read it; and that of the base model is none."""

    def asked() -> dict[str, str]:
        text = server.ask("GET", "/metrics")[2]
        (info,) = [
            sample.labels
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:lora_requests_info"
        ]
        return info

    server.wait_until(server.at_rest)
    quiet = asked()
    assert quiet["running_lora_adapters"] == quiet["waiting_lora_adapters"] == ""
    assert quiet["max_lora"] == str(len(server.engine.adapters.all()))
    body = {"prompt": "hello you", "max_tokens": 300, "ignore_eos": True, "model": "tiny:sql"}
    base = body | {"model": "tiny"}
    seen: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            running = [pool.submit(server.ask, "POST", "/v1/completions", b) for b in (body, base)]
            while not all(one.done() for one in running):
                now = asked()
                seen.add((now["running_lora_adapters"], now["waiting_lora_adapters"]))
            if ("sql", "") in seen:
                break
    assert ("sql", "") in seen and seen <= {("sql", ""), ("", "sql"), ("", "")}
    assert all(one.result()[0] == 200 for one in running)
