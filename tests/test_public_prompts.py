"""The public region over HTTP: who may declare, what all then share, and where that ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.public_prompts import chat_prefix
from tests.http_server import RunningServer, running_server
from tests.tenant_files import Keys, bearer, open_gate

SYSTEM = {
    "role": "system",
    "content": "You are the assistant of the house, and you are brief. " * 4,
}
Asked = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def keys_and_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Keys, RunningServer]]:
    gate, keys = open_gate(
        tmp_path_factory.mktemp("tenants"), acme={}, bravo={}, root={"role": "admin"}
    )
    with running_server(gate=gate, kv_memory="2MiB") as server:
        yield keys, server


@pytest.fixture
def keys(keys_and_server: tuple[Keys, RunningServer]) -> Keys:
    return keys_and_server[0]


@pytest.fixture
def server(keys_and_server: tuple[Keys, RunningServer]) -> Iterator[RunningServer]:
    """With nothing public and nothing cached."""
    keys, server = keys_and_server
    root = bearer(keys["root"])
    for prompt in server.ask("GET", "/v1/cache/public", headers=root)[2]["data"]:
        assert server.ask("DELETE", f"/v1/cache/public/{prompt['id']}", headers=root)[0] == 200
    server.wait_until(server.at_rest)
    assert server.ask("POST", "/v1/cache/reset", headers=root)[0] == 200
    yield server
    assert server.engine.check() == []


def declare(server: RunningServer, key: str, **body: Any) -> Asked:
    return server.ask("POST", "/v1/cache/public", body, headers=bearer(key))


def cached(server: RunningServer, key: str, *messages: Mapping[str, str], **fields: Any) -> int:
    body = {"messages": messages, "max_tokens": 1, "temperature": 0} | fields
    status, _, reply = server.ask("POST", "/v1/chat/completions", body, headers=bearer(key))
    assert status == 200, reply
    found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_public_system_prompt_is_found_by_all_and_nothing_behind_it(
    server: RunningServer, keys: Keys
) -> None:
    """SECURITY-4: two tenants send the same system prompt and the same text of their own."""
    private = user("a text that both of them send, word for word, and that stays theirs " * 3)
    before = cached(server, keys["acme"], SYSTEM, private)
    assert before == 0 and cached(server, keys["bravo"], SYSTEM, private) == 0
    server.ask("POST", "/v1/cache/reset", headers=bearer(keys["root"]))

    status, _, reply = declare(server, keys["root"], messages=[SYSTEM], name="house")
    assert status == 200 and reply["name"] == "house"
    border = reply["tokens"]
    assert reply["resident_tokens"] == border > 32
    assert border % server.engine.config.block_size, "a border inside a block is the harder case"
    assert cached(server, keys["acme"], SYSTEM, private) == border
    assert cached(server, keys["bravo"], SYSTEM, private) == border, "not one token more"
    own = cached(server, keys["acme"], SYSTEM, private)
    assert own > border, "its own repeat goes on behind the border"
    assert cached(server, keys["acme"], SYSTEM, private, cache_salt="x") == border


def test_answers_are_the_same_with_and_without_the_public_region(
    server: RunningServer, keys: Keys
) -> None:
    def answers() -> list[str]:
        found = []
        for name in ("acme", "bravo", "acme"):
            body = {
                "messages": [SYSTEM, user("hello you")],
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
            }
            reply = server.ask("POST", "/v1/chat/completions", body, headers=bearer(keys[name]))[2]
            found.append(reply["choices"][0]["message"]["content"])
        return found

    alone = answers()
    server.ask("POST", "/v1/cache/reset", headers=bearer(keys["root"]))
    declare(server, keys["root"], messages=[SYSTEM])
    assert answers() == alone


def test_it_stays_resident_whatever_flood_goes_through_the_pool(
    server: RunningServer, keys: Keys
) -> None:
    border = declare(server, keys["root"], messages=[SYSTEM])[2]["tokens"]
    evicted = server.engine.stats().cache.evicted_blocks
    for i in range(40):
        body = {"prompt": [3 + (i * 7 + j * 13) % 290 for j in range(300)], "max_tokens": 1}
        server.ask("POST", "/v1/completions", body, headers=bearer(keys["acme"]))
    assert server.engine.stats().cache.evicted_blocks > evicted
    assert cached(server, keys["bravo"], SYSTEM, user("hello")) == border


def test_only_admins_declare_list_and_withdraw(server: RunningServer, keys: Keys) -> None:
    """SECURITY-6"""
    (prompt_id,) = [declare(server, keys["root"], messages=[SYSTEM])[2]["id"]]
    for method, path, body in (
        ("POST", "/v1/cache/public", {"messages": [SYSTEM]}),
        ("GET", "/v1/cache/public", None),
        ("DELETE", f"/v1/cache/public/{prompt_id}", None),
    ):
        assert server.ask(method, path, body)[0] == 401
        assert server.ask(method, path, body, headers=bearer(keys["acme"]))[0] == 403
    listed = server.ask("GET", "/v1/cache/public", headers=bearer(keys["root"]))[2]["data"]
    assert [prompt["id"] for prompt in listed] == [prompt_id]


def test_the_same_again_is_the_same_and_a_withdrawn_one_is_private_again(
    server: RunningServer, keys: Keys
) -> None:
    first = declare(server, keys["root"], messages=[SYSTEM])[2]
    again = declare(server, keys["root"], messages=[SYSTEM], name="house")[2]
    assert again["id"] == first["id"] and again["name"] == "house"
    assert cached(server, keys["acme"], SYSTEM, user("one")) == first["tokens"]
    path = f"/v1/cache/public/{first['id']}"
    assert server.ask("DELETE", path, headers=bearer(keys["root"]))[2]["deleted"] is True
    assert server.ask("DELETE", path, headers=bearer(keys["root"]))[0] == 404
    assert cached(server, keys["bravo"], SYSTEM, user("two")) == 0
    assert cached(server, keys["bravo"], SYSTEM, user("twice")) >= first["tokens"]


def test_tokens_and_text_can_be_declared_as_well(server: RunningServer, keys: Keys) -> None:
    ids = server.engine.tokenize("the user is in the system and you are in the house ") * 3
    assert declare(server, keys["root"], tokens=ids)[2]["resident_tokens"] == len(ids)
    for name in ("acme", "bravo"):
        body = {"prompt": [*ids, 7, 8, 9], "max_tokens": 1}
        reply = server.ask("POST", "/v1/completions", body, headers=bearer(keys[name]))[2]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids)
    text = declare(server, keys["root"], prompt="you and the user and the house")
    assert text[0] == 200 and text[2]["resident_tokens"] == text[2]["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "exactly one of messages, prompt and tokens"),
        ({"tokens": [99_999]}, 400, "tokens"),
        ({"tokens": [5] * 100_000}, 400, "maximum context length"),
        ({"tokens": [5] * 2500}, 400, "may keep"),
        ({"messages": [], "model": "tiny"}, 400, "messages"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "does not exist"),
    ],
)
def test_what_cannot_be_public_is_refused_in_words(
    server: RunningServer, keys: Keys, body: dict[str, Any], status: int, words: str
) -> None:
    answer = declare(server, keys["root"], **body)
    assert answer[0] == status, answer
    assert words in answer[2]["error"]["message"]
    assert not server.ask("GET", "/v1/cache/public", headers=bearer(keys["root"]))[2]["data"]


def test_a_chats_border_is_where_every_such_chat_still_agrees(server: RunningServer) -> None:
    render = server.engine.render
    ids = chat_prefix(render, [SYSTEM])
    for text in ("hello", "", "<|im_start|>", "\n\n"):
        assert render([SYSTEM, user(text)])[: len(ids)] == ids
    assert chat_prefix(render, [SYSTEM, user("hello")])[: len(ids)] == ids
    assert len(chat_prefix(render, [SYSTEM, user("hello")])) > len(ids)


def test_a_template_that_wants_a_user_or_trims_still_has_a_border() -> None:
    def trims(messages: Sequence[Mapping[str, str]], **_: Any) -> list[int]:
        text = "|".join(message["content"].strip() for message in messages)
        if len(messages) < 2:
            raise InvalidRequest("the last message must be the user's")
        return list(text.encode())

    assert bytes(chat_prefix(trims, [{"role": "system", "content": "be brief "}])) == b"be brief|"

    def reversed_(messages: Sequence[Mapping[str, str]], **_: Any) -> list[int]:
        return list("".join(message["content"] for message in reversed(messages)).encode())

    with pytest.raises(InvalidRequest, match="no token in common"):
        chat_prefix(reversed_, [{"role": "system", "content": "be brief"}])
