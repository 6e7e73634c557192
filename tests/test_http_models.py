"""Models, health, tokens and the cache's own routes."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest

import radixkv
from radixkv.service.http.server import HttpServer, bind
from radixkv.service.http.serving import Serving
from tests.http_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def test_the_served_model_is_listed_with_its_context(server: RunningServer) -> None:
    status, _, reply = server.ask("GET", "/v1/models")
    (card,) = reply["data"]
    assert (status, reply["object"]) == (200, "list")
    assert (card["id"], card["root"], card["parent"]) == ("tiny", "tiny", None)
    assert card["max_model_len"] == server.engine.max_model_len
    assert server.ask("GET", "/v1/models/tiny")[2] == card
    with server.client() as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").created == card["created"]


def test_a_model_id_with_slashes_is_looked_up_whole(server: RunningServer) -> None:
    status, _, reply = server.ask("GET", "/v1/models/org/name")
    assert status == 404
    assert "org/name" in reply["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ping"])
def test_health_has_three_names(server: RunningServer, path: str) -> None:
    assert server.ask("GET", path)[::2] == (200, {"status": "ok"})


def test_version_and_load_answer(server: RunningServer) -> None:
    assert server.ask("GET", "/version")[2] == {"version": radixkv.__version__}
    assert server.ask("GET", "/load")[2] == {"server_load": 0}
    assert server.ask("GET", "/openapi.json")[2]["openapi"] == "3.1.0"


def test_tokens_go_there_and_back(server: RunningServer) -> None:
    text = "hello you, 👋 日本"
    reply = server.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True})[2]
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == server.engine.max_model_len
    back = server.ask("POST", "/detokenize", {"tokens": reply["tokens"]})[2]
    assert back == {"prompt": text, "content": text}
    assert server.ask("POST", "/tokenize", {"content": text})[2]["tokens"] == reply["tokens"]
    assert server.ask("POST", "/detokenize", {"tokens": []})[2]["prompt"] == ""


def test_a_foreign_token_id_is_a_400(server: RunningServer) -> None:
    status, _, reply = server.ask("POST", "/detokenize", {"tokens": [99_999]})
    assert (status, reply["error"]["param"]) == (400, "tokens")


def test_a_long_text_is_tokenized_beside_the_loop_and_comes_out_the_same(
    server: RunningServer,
) -> None:
    text = "the user is in the system and " * 4000
    reply = server.ask("POST", "/tokenize", {"prompt": text})[2]
    assert reply["tokens"] == server.engine.tokenize(text)


def test_cache_stats_add_up_and_a_reset_empties(server: RunningServer) -> None:
    prompt = {"prompt": "you and the user " * 10, "max_tokens": 1}
    for _ in range(2):
        server.ask("POST", "/v1/completions", prompt)
    server.wait_until(server.at_rest)
    stats = server.ask("GET", "/v1/cache/stats")[2]
    blocks = stats["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["used"] == blocks["total"]
    assert 0 < stats["tokens"]["hit"] <= stats["tokens"]["queried"]
    assert 0 < stats["hit_rate"] < 1
    for path in ("/v1/cache/reset", "/reset_prefix_cache"):
        status, _, reply = server.ask("POST", path)
        assert status == 200
        assert reply["object"] == "cache.reset"
    assert server.ask("GET", "/v1/cache/stats")[2]["blocks"]["cached"] == 0
    again = server.ask("POST", "/v1/completions", prompt)[2]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_reset_while_requests_run_is_a_409_that_says_so(server: RunningServer) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model="tiny",
            prompt="the",
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        status, _, reply = server.ask("POST", "/v1/cache/reset")
        stream.close()
    assert status == 409
    assert reply["error"]["code"] == "cache_busy"
    assert reply["error"]["message"]
    server.wait_until(server.at_rest)


def test_a_web_page_cannot_reset_the_cache(server: RunningServer) -> None:
    """SECURITY-6"""
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        status, _, reply = server.ask("POST", "/v1/cache/reset", headers={"Origin": origin})
        assert (status, reply["error"]["type"]) == (403, "permission_error")
    assert server.ask("POST", "/v1/cache/reset", headers={"Origin": server.url})[0] == 200


def test_a_page_whose_name_was_made_to_point_here_gets_nothing(server: RunningServer) -> None:
    """SECURITY-6: DNS rebinding, where Host and Origin agree on a name that is not ours."""
    port = server.url.rpartition(":")[2]
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "["):
        headers = {"Host": host, "Origin": f"http://{host}"}
        for method, path in (("POST", "/v1/cache/reset"), ("GET", "/v1/cache/stats")):
            status, _, reply = server.ask(method, path, headers=headers)
            assert (status, reply["error"]["code"]) == (403, "forbidden"), host
    for host in (f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert server.ask("GET", "/v1/cache/stats", headers={"Host": host})[0] == 200


async def test_a_server_that_others_may_reach_answers_to_any_name() -> None:
    """A name in a network is the operator's affair, who has said --insecure-remote."""
    for host, any_name, named in (("127.0.0.1", True, 200), ("0.0.0.0", False, 200),
                                  ("127.0.0.1", False, 403)):  # fmt: skip
        server = HttpServer(Serving(), bind(host, 0), max_body=2**20, any_name=any_name)
        await server.start()
        async with (
            aiohttp.ClientSession() as session,
            session.get(server.url + "/version", headers={"Host": "my-machine"}) as reply,
        ):
            assert reply.status == named
        await server.stop(0)


def test_what_anybody_can_read_holds_no_text_and_no_tokens(server: RunningServer) -> None:
    """SECURITY-5: after somebody's secret went through."""
    secret = "xyzzy-plugh"
    ids = server.ask("POST", "/tokenize", {"prompt": secret})[2]["tokens"]
    body = {"prompt": secret, "max_tokens": 2, "cache_salt": "tenant-one", "user": "tenant-one"}
    assert server.ask("POST", "/v1/completions", body)[0] == 200
    for path in ("/metrics", "/v1/cache/stats", "/v1/models", "/load", "/health", "/version"):
        text = str(server.ask("GET", path)[2])
        assert secret not in text and "tenant-one" not in text, path
        assert str(ids)[1:-1] not in text, path


def test_the_log_tells_tokens_and_times_but_never_what_was_said(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """SECURITY-5"""
    caplog.set_level("DEBUG")
    secret = "xyzzy-plugh"
    body = {"prompt": secret, "max_tokens": 2, "ignore_eos": True, "stop": secret}
    server.ask("POST", f"/v1/completions?key={secret}", body, headers={"X-Request-Id": "mine"})
    server.ask("POST", "/v1/completions", body | {"max_tokens": secret})
    lines = [r for r in caplog.records if r.name == "radixkv.http"]
    good, bad = (r.__dict__["fields"] for r in lines)
    assert (good["id"], good["status"], good["path"]) == ("mine", 200, "/v1/completions")
    assert good["prompt_tokens"] > 0 and good["completion_tokens"] == 2
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert (bad["status"], bad["error"]) == (400, "invalid_type")
    assert not any(secret in str(r.__dict__) for r in lines)
