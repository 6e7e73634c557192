"""Pinned prompts over HTTP: they outlive a flood, within a budget, for as long as was asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from radixkv.service.http.pins_schema import PinList, PinReply, PrewarmReply
from tests.http_server import RunningServer, running_server

BLOCKS, BLOCK, BUDGET = 64, 16, 16
FIVE: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A pool of 64 blocks, a quarter of which may be pinned."""
    with running_server(kv_memory="512KiB", max_model_len=512, pin_budget=0.25) as server:
        stats = server.engine.stats()
        assert stats.num_blocks == BLOCKS
        yield server


@pytest.fixture
def server(small: RunningServer) -> Iterator[RunningServer]:
    """The same, with nothing pinned."""
    yield small
    for pin in pins(small)["data"]:
        assert post(small, "unpin", {"id": pin["id"]})[0] == 200
    assert small.engine.check() == []
    small.wait_until(small.at_rest)


def post(server: RunningServer, what: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, _, reply = server.ask("POST", f"/v1/cache/{what}", body)
    return status, reply


def pins(server: RunningServer) -> Any:
    status, _, reply = server.ask("GET", "/v1/cache/pins")
    assert status == 200, reply
    return TypeAdapter(PinList).validate_python(reply, strict=True)


def words(num_tokens: int) -> list[int]:
    """Tokens that no other call gave."""
    rng = random.Random(next(_numbers))
    return [rng.randrange(3, 250) for _ in range(num_tokens)]


def text(num_chars: int) -> str:
    rng = random.Random(next(_numbers))
    return "".join(rng.choice("bcdfgjkpqvxz") for _ in range(num_chars))


def cached(server: RunningServer, tokens: list[int]) -> int:
    """Tokens that a request finds; as it is made, what it finds is fresh again."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
    status, _, reply = server.ask("POST", "/v1/completions", body)
    assert status == 200, reply
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def flood(server: RunningServer) -> None:
    """Compute three times what the pool holds."""
    evicted = server.engine.cache.stats().evicted_blocks
    for _ in range(8):
        body = {"prompt": [words(12 * BLOCK) for _ in range(2)], "max_tokens": 1}
        assert server.ask("POST", "/v1/completions", body)[0] == 200
    assert server.engine.cache.stats().evicted_blocks - evicted > BLOCKS


def test_a_pinned_prompt_survives_a_flood_and_an_unpinned_one_does_not(
    server: RunningServer,
) -> None:
    """EVICT-3: pinned, listed, hit in full, and let go by a call."""
    prompt = words(6 * BLOCK + 5)
    status, reply = post(server, "pin", {"tokens": prompt, "name": "the system prompt"})
    assert status == 200, reply
    assert TypeAdapter(PinReply).validate_python(reply, strict=True) == reply
    assert reply["pinned_tokens"] == reply["wanted_tokens"] == len(prompt)
    assert reply["budget"] == {"blocks": BUDGET, "used_blocks": 7}
    (listed,) = pins(server)["data"]
    assert listed["name"] == "the system prompt" and listed["blocks"] == 7
    assert listed["ttl_s"] is None and listed["expires_at"] is None
    flood(server)
    assert cached(server, prompt) == len(prompt) - 1
    assert post(server, "unpin", {"name": "the system prompt"}) == (
        200,
        {"object": "cache.unpin", "ids": [reply["id"]]},
    )
    assert pins(server)["data"] == [] and pins(server)["budget"]["used_blocks"] == 0
    flood(server)
    assert cached(server, prompt) == 0


def test_over_the_budget_less_is_granted_and_at_last_nothing_with_the_reason(
    server: RunningServer,
) -> None:
    """EVICT-3: pins over the cap are refused with a reason."""
    assert post(server, "pin", {"tokens": words(12 * BLOCK)})[1]["pinned_tokens"] == 12 * BLOCK
    prompt = words(10 * BLOCK)
    status, reply = post(server, "pin", {"tokens": prompt})
    assert (status, reply["pinned_tokens"], reply["wanted_tokens"]) == (200, 4 * BLOCK, 10 * BLOCK)
    assert reply["budget"] == {"blocks": BUDGET, "used_blocks": BUDGET}
    status, reply = post(server, "pin", {"tokens": words(40)})
    assert (status, reply["error"]["code"]) == (409, "pin_budget_exceeded")
    assert "16 blocks of 16 tokens" in reply["error"]["message"]
    assert len(pins(server)["data"]) == 2
    flood(server)
    assert cached(server, prompt) == 4 * BLOCK


def test_two_pins_of_one_beginning_hold_it_until_both_are_gone(server: RunningServer) -> None:
    """EVICT-4, and what they have in common is paid for once."""
    shared = words(4 * BLOCK)
    ours, theirs = shared + words(2 * BLOCK), shared + words(2 * BLOCK)
    assert post(server, "pin", {"tokens": ours, "name": "ours"})[0] == 200
    reply = post(server, "pin", {"tokens": theirs, "name": "theirs"})[1]
    assert reply["budget"]["used_blocks"] == 8
    assert post(server, "unpin", {"name": "ours"})[0] == 200
    flood(server)
    assert cached(server, ours) == 4 * BLOCK
    assert cached(server, theirs) == 6 * BLOCK - 1


def test_a_name_is_of_one_prompt_and_the_same_prompt_is_one_pin(server: RunningServer) -> None:
    first, second = words(3 * BLOCK), words(14 * BLOCK)
    ids = [post(server, "pin", {"tokens": first, "name": "n"})[1]["id"] for _ in range(2)]
    assert ids[0] == ids[1]
    reply = post(server, "pin", {"tokens": second, "name": "n"})[1]
    assert reply["pinned_tokens"] == 14 * BLOCK, "the old one made room"
    assert [pin["id"] for pin in pins(server)["data"]] == [reply["id"]]


def test_a_pin_without_use_ends_with_its_time_and_use_begins_it_anew(
    server: RunningServer,
) -> None:
    core = server.engine._core
    now, real = [0.0], core.cache.pins.clock
    core.call(lambda: setattr(core.cache.pins, "clock", lambda: now[0])).result()
    try:
        prompt = words(5 * BLOCK)
        reply = post(server, "pin", {"tokens": prompt, "ttl": "5m"})[1]
        assert reply["ttl_s"] == 300.0
        now[0] = 299.0
        assert cached(server, prompt + words(20)) == 5 * BLOCK
        now[0] = 598.0
        (listed,) = pins(server)["data"]
        assert listed["expires_at"] - listed["created_at"] == 599
        now[0] = 600.0
        assert pins(server)["data"] == []
    finally:
        core.call(lambda: setattr(core.cache.pins, "clock", real)).result()


def test_a_pinned_system_prompt_is_used_by_the_chats_that_begin_with_it(
    server: RunningServer,
) -> None:
    """It ends where any message may follow, not in the beginning of an answer that no chat has."""
    system = {"role": "system", "content": text(70)}
    pinned = post(server, "pin", {"messages": [system], "ttl": "1h"})[1]
    assert pinned["pinned_tokens"] == pinned["wanted_tokens"]
    core = server.engine._core

    def expiry() -> float:
        (pin,) = [pin for pin in core.call(core.cache.pins.list).result() if pin.ttl_s == 3600]
        assert pin.expires_at is not None
        return pin.expires_at

    before = expiry()
    body = {"messages": [system, {"role": "user", "content": "hello"}], "max_tokens": 1}
    usage = server.ask("POST", "/v1/chat/completions", body)[2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pinned["pinned_tokens"]
    assert expiry() > before, "used, so begun anew"
    asked = post(server, "pin", {"messages": body["messages"]})[1]
    assert asked["wanted_tokens"] == usage["prompt_tokens"], "a question is pinned as it is asked"
    begun = {"messages": [system], "add_generation_prompt": True}
    assert post(server, "pin", begun)[1]["wanted_tokens"] > pinned["wanted_tokens"]


def test_what_is_asked_wrongly_is_refused(server: RunningServer) -> None:
    for what, body, param in (
        ("pin", {}, None),
        ("pin", {"tokens": [5], "prompt": "a"}, None),
        ("pin", {"tokens": [5], "ttl": "soon"}, "ttl"),
        ("pin", {"tokens": [5], "ttl": "99d"}, "ttl"),
        ("pin", {"tokens": [10**6]}, "tokens"),
        ("pin", {"tokens": []}, "tokens"),
        ("unpin", {}, None),
        ("unpin", {"id": "x", "name": "y"}, None),
        ("prewarm", {"messages": []}, "messages"),
    ):
        status, reply = post(server, what, body)
        assert (status, reply["error"]["param"]) == (400, param), (what, body, reply)
    for body in ({"id": "pin-0"}, {"name": "nobody's"}):
        status, reply = post(server, "unpin", body)
        assert (status, reply["error"]["code"]) == (404, "pin_not_found")
    assert post(server, "pin", {"tokens": [5], "model": "other"})[0] == 404


def test_the_list_takes_no_parameters_and_says_so(server: RunningServer) -> None:
    status, _, reply = server.ask("GET", "/v1/cache/pins?tenant=other")
    assert (status, reply["error"]["param"]) == (400, "tenant")
    assert reply["error"]["message"].endswith("known: none")


def test_a_prompt_is_warm_when_the_answer_comes(server: RunningServer) -> None:
    messages = [{"role": "system", "content": text(100)}, {"role": "user", "content": "hello"}]
    status, reply = post(server, "prewarm", {"messages": messages})
    assert status == 200, reply
    assert TypeAdapter(PrewarmReply).validate_python(reply, strict=True) == reply
    assert reply["cached_tokens"] < 10
    assert reply["resident_tokens"] == reply["prompt_tokens"] - 1
    body = {"messages": messages, "max_tokens": 1}
    usage = server.ask("POST", "/v1/chat/completions", body)[2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == reply["resident_tokens"]
    assert usage["prompt_tokens"] == reply["prompt_tokens"]
    again = post(server, "prewarm", {"messages": messages})[1]
    assert again["cached_tokens"] == reply["resident_tokens"]
    assert pins(server)["data"] == []


def test_a_warmed_prompt_may_be_pinned_by_its_breakpoints(server: RunningServer) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": text(60)} | FIVE]}
    reply = post(server, "prewarm", {"messages": [system, {"role": "user", "content": "a"}]})[1]
    assert reply["radixkv"]["pinned_tokens"] == reply["radixkv"]["wanted_tokens"] > 60
    (listed,) = pins(server)["data"]
    assert (listed["pinned_tokens"], listed["ttl_s"]) == (reply["radixkv"]["pinned_tokens"], 300.0)


def claude(server: RunningServer, **fields: Any) -> tuple[Any, Any]:
    """Ask Anthropic's route; returns the answer and its usage, whose parts must add up."""
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0} | fields
    status, _, reply = server.ask("POST", "/v1/messages", body)
    assert status == 200, reply
    usage = reply["usage"]
    _, _, count = server.ask(
        "POST",
        "/v1/messages/count_tokens",
        {"model": "tiny"} | {k: v for k, v in fields.items() if k in ("messages", "system")},
    )
    made = usage["cache_creation"]
    assert sum(made.values()) == usage["cache_creation_input_tokens"]
    assert count["input_tokens"] == (
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
    )
    return reply, usage


def test_breakpoints_of_anthropics_clients_are_made_once_read_later_and_outlive_a_flood(
    server: RunningServer,
) -> None:
    """EVICT-3, by the fields that clients send already."""
    server.ask("POST", "/v1/cache/reset")
    system = [
        {"type": "text", "text": text(80)} | HOUR,
        {"type": "text", "text": text(40)} | FIVE,
    ]
    asked: dict[str, Any] = {
        "system": system,
        "messages": [{"role": "user", "content": "hello"}],
    }
    reply, usage = claude(server, **asked)
    made = usage["cache_creation"]
    assert usage["cache_read_input_tokens"] == 0
    assert made["ephemeral_1h_input_tokens"] >= 80 and made["ephemeral_5m_input_tokens"] >= 40
    assert reply["radixkv"]["pinned_tokens"] == usage["cache_creation_input_tokens"]
    assert [pin["ttl_s"] for pin in pins(server)["data"]] == [3600.0, 300.0]
    flood(server)
    asked["messages"] = [{"role": "user", "content": "and now?"}]
    _, again = claude(server, **asked)
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= usage["cache_creation_input_tokens"]


def test_a_growing_chat_has_one_pin_that_grows(server: RunningServer) -> None:
    chat: list[dict[str, Any]] = []
    sizes = []
    for turn in range(4):
        chat.append({"role": "user", "content": text(30)})
        _, usage = claude(server, messages=chat, **FIVE)
        (pin,) = pins(server)["data"]
        sizes.append(pin["pinned_tokens"])
        if turn:
            assert usage["cache_creation_input_tokens"] >= 30
            assert usage["cache_read_input_tokens"] >= sizes[-2]
        chat.append({"role": "assistant", "content": "yes"})
    assert sizes == sorted(set(sizes))


def test_a_stream_tells_of_its_breakpoints_at_its_start(server: RunningServer) -> None:
    """USAGE-1: what is cached, and what was made to stay, is the same at the start and the end."""
    messages = [{"role": "user", "content": text(50)}]
    body = {"model": "tiny", "max_tokens": 3, "messages": messages, "stream": True} | FIVE
    status, _, events = server.ask("POST", "/v1/messages", body)
    assert status == 200
    assert events.count('"cache_creation_input_tokens":') == 2
    made = events.split('"cache_creation_input_tokens":')[1].split(",")[0]
    assert int(made) >= 50
    assert f'"cache_creation_input_tokens":{made},' in events.split("message_delta")[-1]


def test_openais_fields_pin_too_and_say_how_much(server: RunningServer) -> None:
    part = {"type": "text", "text": text(100), "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": text(20)}]}]
    body = {"messages": messages, "max_tokens": 1}
    reply = server.ask("POST", "/v1/chat/completions", body)[2]
    record, usage = reply["radixkv"], reply["usage"]
    assert 100 < record["pinned_tokens"] == record["wanted_tokens"] < usage["prompt_tokens"] - 20
    assert [pin["ttl_s"] for pin in pins(server)["data"]] == [1800.0]
    kept = body | {"messages": [{"role": "user", "content": text(50)}]}
    reply = server.ask("POST", "/v1/chat/completions", kept | {"prompt_cache_retention": "24h"})[2]
    assert reply["radixkv"]["pinned_tokens"] == reply["radixkv"]["wanted_tokens"] > 50
    assert [pin["ttl_s"] for pin in pins(server)["data"]] == [1800.0, 86400.0]
    plain = server.ask("POST", "/v1/chat/completions", body | {"messages": kept["messages"]})[2]
    assert "pinned_tokens" not in plain["radixkv"]


def test_short_of_budget_an_answer_says_what_was_granted(server: RunningServer) -> None:
    assert post(server, "pin", {"tokens": words(14 * BLOCK)})[0] == 200
    messages = [{"role": "user", "content": text(100)}]
    options = {"prompt_cache_options": {"ttl": "1h"}, "stream": True}
    options["stream_options"] = {"include_usage": True}
    events = server.events(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 2} | options
    )
    record = events[-2]["radixkv"]
    assert record["pinned_tokens"] == 2 * BLOCK < 100 < record["wanted_tokens"]
    _, usage = claude(server, messages=[{"role": "user", "content": text(100)}], **FIVE)
    assert usage["cache_creation_input_tokens"] == 0, "nothing stays, so nothing was made to"
    assert usage["input_tokens"] > 100


def test_answers_are_the_same_with_and_without_breakpoints(server: RunningServer) -> None:
    """The prompt's last block is shared early, so the answer begins in a copy of it."""
    messages = [{"role": "user", "content": text(45)}]
    body = {"messages": messages, "max_tokens": 20, "n": 3, "seed": 5}
    plain = server.ask("POST", "/v1/chat/completions", body)[2]["choices"]
    for _ in range(2):
        marked = server.ask("POST", "/v1/chat/completions", body | FIVE)[2]["choices"]
        assert [c["message"] for c in marked] == [c["message"] for c in plain]


def test_pins_leave_room_for_the_longest_request(server: RunningServer) -> None:
    """SCHED-1: with all pinned that may be, a request of the whole context is still served."""
    assert post(server, "pin", {"tokens": words(16 * BLOCK)})[1]["budget"]["used_blocks"] == 16
    body = {"prompt": words(500), "max_tokens": 12, "ignore_eos": True}
    status, _, reply = server.ask("POST", "/v1/completions", body)
    assert (status, reply["usage"]["total_tokens"]) == (200, 512)


def test_where_nothing_may_be_pinned_that_is_said() -> None:
    with running_server(kv_memory="256KiB") as server:  # the longest context takes all of it
        status, reply = post(server, "pin", {"tokens": words(40)})
        assert (status, reply["error"]["code"]) == (409, "pin_budget_exceeded")
        _, usage = claude(server, messages=[{"role": "user", "content": text(50)}], **FIVE)
        assert usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("off", [{"prefix_cache": False}, {"force_miss": True}])
def test_without_a_cache_nothing_is_computed_to_be_pinned_and_that_is_said(off: Any) -> None:
    with running_server(**off) as server:
        status, reply = post(server, "pin", {"prompt": "hello you"})
        assert (status, reply["error"]["code"]) == (409, "prefix_cache_off")
        assert server.engine.stats().prompt_tokens_total == 0
        assert post(server, "prewarm", {"prompt": "hello you"})[1]["resident_tokens"] == 0
