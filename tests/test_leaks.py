"""What one tenant can learn of another's prompts from a running server: nothing.

The attacker holds a good key, knows the victim's prompts or guesses them, may set every field of a
request and measure its time. Each test also shows that what it looks for is there to be seen by the
victim itself, so that it cannot pass with the cache off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from radixkv.service.engine.origin import Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.http.openapi_routes import ROUTES
from tests.http_server import RunningServer, running_server
from tests.leak_harness import BEST_AUC, WORST_AUC, Attack, Ids, Party, Samples, settle
from tests.tenant_files import Keys, bearer, open_gate

LENGTH = 512
"""Tokens of a prompt: two steps of the server below when cold, one when warm."""


@pytest.fixture(scope="module")
def keys_and_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Keys, RunningServer]]:
    folder = tmp_path_factory.mktemp("tenants")
    gate, keys = open_gate(folder, victim={}, attacker={}, snoop={}, root={"role": "admin"})
    with running_server(gate=gate, kv_memory="32MiB", max_batch_tokens=256) as server:
        yield keys, server


@pytest.fixture
def attack(keys_and_server: tuple[Keys, RunningServer]) -> Iterator[Attack]:
    keys, server = keys_and_server
    attack = Attack(server, keys)
    attack.forget()
    yield attack
    attack.close()


def forged_fields(attack: Attack) -> list[dict[str, Any]]:
    """Everything that a caller may set, with every name that means something inside."""
    theirs = attack.server.engine._identity(Origin(tenant="victim"))
    names = ["victim", "local", "public", "none", "", theirs.digest().hex(), theirs.model]
    found: list[dict[str, Any]] = []
    for name in names:
        if name:
            found.append({"cache_salt": name})
            found.append({"prompt_cache_key": name})
        found.append({"user": name, "tenant": name, "namespace": name, "safety_identifier": name})
        found.append({"headers": {"X-Tenant": name or "x", "X-User": name, "X-Request-Id": name}})
    found.append({"extra_key": theirs.digest().hex(), "cache_salt": None})
    found.append({"priority": -5})
    found.append({"service_tier": "batch"})
    return found


def test_beginnings_of_1_to_64_tokens_of_anothers_prompt_are_never_found(attack: Attack) -> None:
    """SECURITY-1: alone, and with something else behind them."""
    alone = attack.prompts(64, length=100)
    longer = attack.prompts(64, length=100)
    attack.victim.send(alone)
    attack.victim.send(longer)
    guesses = [prompt[: i + 1] for i, prompt in enumerate(alone)]
    assert attack.attacker.send(guesses).cached_tokens == 0
    guesses = [[*prompt[: i + 1], 2, 2] for i, prompt in enumerate(longer)]
    assert attack.attacker.send(guesses).cached_tokens == 0
    own = attack.victim.send(guesses)
    assert own.cached_tokens == sum(range(1, 65)), "the victim itself finds each of them"


def test_no_field_and_no_header_opens_anothers_cache(attack: Attack) -> None:
    """SECURITY-1, SECURITY-3: salts, labels, users and names of internal things."""
    forged = forged_fields(attack)
    secrets = attack.prompts(len(forged), length=60)
    attack.victim.send(secrets)
    for fields, secret in zip(forged, secrets, strict=True):
        assert attack.attacker.send(secret, **fields).cached_tokens == 0, fields
    assert attack.victim.send(secrets).cached_tokens == sum(len(s) - 1 for s in secrets)

    (secret,) = attack.prompts(1, length=60)
    attack.victim.send(secret, cache_salt="ours")
    assert attack.attacker.send(secret, cache_salt="ours").cached_tokens == 0
    assert attack.victim.send(secret).cached_tokens == 0, "a salt divides a tenant's own, too"
    assert attack.victim.send(secret, cache_salt="ours").cached_tokens == len(secret) - 1


def test_the_time_to_the_first_token_does_not_tell_what_another_has_sent(attack: Attack) -> None:
    """SECURITY-2: nor does any number of the answer, nor the work that it takes."""
    guesses, own, steps = Samples(), Samples(), {True: set[int](), False: set[int]()}
    trials = attack.trials(LENGTH)

    def measure(number: int) -> float:
        for _ in range(2 * number):
            sent, guess = next(trials)
            probe = attack.attacker.send(guess)
            (guesses.sent if sent else guesses.unsent).append(probe.ttft_s)
            steps[sent].add(probe.steps)
            assert probe.cached_tokens <= 3, "a chance beginning of the attacker's own prompts"
        return guesses.auc

    for _ in range(20):
        prompt = attack.prompt(LENGTH)
        own.unsent.append(attack.victim.send(prompt).ttft_s)
        warm = attack.victim.send(prompt)
        own.sent.append(warm.ttft_s)
        assert (warm.cached_tokens, warm.steps) == (LENGTH - 1, 1)
    assert own.auc > BEST_AUC, "the victim's own repeat is there to be seen"
    found = settle(measure, rounds=(50, 50, 100, 200))
    assert abs(found - 0.5) <= WORST_AUC, found
    assert steps[True] == steps[False] == {2}, "in steps there is no noise: none may differ"


def race(
    party: Party,
    samples: Samples,
    sent: Ids,
    unsent: Ids,
    *,
    first: bool,
    ahead: Callable[[], object] = lambda: None,
) -> None:
    """Send both at once, ``sent`` first or second, and note the places in which they end."""
    order = party.race([sent, unsent] if first else [unsent, sent], ahead)
    samples.sent.append(order.index(0 if first else 1))
    samples.unsent.append(order.index(1 if first else 0))


def test_the_order_of_completion_does_not_tell_what_another_has_sent(attack: Attack) -> None:
    """SECURITY-2: of two prompts sent at once, the one that another has sent is no sooner done."""
    attacker, victim = Samples(), Samples()
    trials = attack.trials(LENGTH)

    def measure(number: int) -> float:
        for i in range(number):
            (_, one), (_, two) = sorted((next(trials), next(trials)), reverse=True)
            race(attack.attacker, attacker, one, two, first=i % 2 == 0)
        return attacker.auc

    for i in range(16):
        known, fresh = attack.prompt(LENGTH), attack.prompt(LENGTH)
        attack.victim.send(known)
        race(attack.victim, victim, known, fresh, first=i % 2 == 0)
    assert victim.auc > BEST_AUC, "the victim's own repeat is done first"
    found = settle(measure, rounds=(12, 24, 48))
    assert abs(found - 0.5) <= WORST_AUC, found


def test_a_prompt_that_another_is_sending_right_now_is_not_waited_for(attack: Attack) -> None:
    """SECURITY-2: one computes for all who want the same, but only for one tenant's own."""
    engine, found = attack.server.engine, Samples()

    def victim_sends(prompt: Ids) -> Callable[[], object]:
        params = SamplingParams(max_tokens=1)
        return lambda: engine.submit(prompt, params, origin=Origin(tenant="victim"))

    for i in range(12):
        secret, fresh = attack.prompt(LENGTH), attack.prompt(LENGTH)
        race(attack.attacker, found, secret, fresh, first=i % 2 == 0, ahead=victim_sends(secret))
    assert abs(found.auc - 0.5) <= WORST_AUC, found.auc
    secret = attack.prompt(LENGTH)
    victim_sends(secret)()
    beside = attack.victim.send(secret)
    assert beside.cached_tokens == LENGTH - 1, "the victim does wait for its own"


def test_an_explanation_is_the_same_whether_or_not_another_has_sent_the_prompt(
    attack: Attack,
) -> None:
    """SECURITY-1: sent before, being computed now, or never."""

    def explained(party: Party, prompt: Ids) -> dict[str, Any]:
        status, text = party.ask("POST", "/v1/cache/explain", {"tokens": prompt})
        assert status == 200, text
        found: dict[str, Any] = json.loads(text.split("\n", 1)[1])
        return found

    before, now, never = attack.prompts(3, length=200)
    attack.victim.send(before)
    running = attack.server.engine.submit(
        now, SamplingParams(max_tokens=3000, ignore_eos=True), origin=Origin(tenant="victim")
    )
    deltas = iter(running)
    next(deltas)
    try:
        told = [explained(attack.snoop, prompt) for prompt in (before, now, never)]
        assert told[0] == told[1] == told[2]
        assert told[0]["resident_tokens"] == 0
        assert explained(attack.victim, before)["resident_tokens"] == len(before) - 1
        assert explained(attack.victim, now)["resident_tokens"] > 0
    finally:
        running.abort()


SECRET = "the launch code is xyzzy-plugh-quux"
GUESS = "the launch code is "


def test_no_route_shows_anything_of_another_tenant(attack: Attack) -> None:
    """SECURITY-1, SECURITY-5: whatever routes there are, asked with every body we know."""
    server = attack.server
    messages = [{"role": "user", "content": SECRET}]
    guess = [{"role": "user", "content": GUESS}]
    ids = server.engine.tokenize("xyzzy-plugh-quux")
    for chat in ("/v1/chat/completions", "/v1/messages"):
        said = {"model": "tiny", "messages": messages, "max_tokens": 4, "user": "victim-user",
                "prompt_cache_key": "victim-label", "cache_salt": "victim-salt"}  # fmt: skip
        attack.victim.ask("POST", chat, said)
    attack.victim.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 4})
    server.wait_until(attack.idle)

    def expect_nothing(text: str, where: str) -> None:
        for word in ("xyzzy", "plugh", "quux", "victim"):
            assert word not in text, where
        for spelt in (str(ids)[1:-1], ",".join(map(str, ids)), json.dumps(ids)[1:-1]):
            assert spelt not in text, where

    bodies: list[dict[str, Any] | None] = [
        {"model": "tiny", "messages": guess, "max_tokens": 2},
        {"model": "tiny", "prompt": GUESS, "max_tokens": 2},
        {"model": "tiny", "tokens": server.engine.tokenize(GUESS)},
        {},
        None,
    ]
    shown = 0
    for route in ROUTES:
        path = route.path.replace("{model}", "tiny").replace("{", "").replace("}", "")
        if route.path == "/v1/cache/events":
            continue  # an endless answer, which its own tests read
        for body in bodies if route.method == "post" else [None]:
            for query in ("", "?tenant=victim&by=tenant&window=1h&text=1", "?by=prompt_cache_key"):
                status, text = attack.snoop.ask(route.method.upper(), path + query, body)
                assert status < 500, (path, body, text)
                expect_nothing(text, f"{route.method} {path}{query} {body}")
                shown += status == 200
    assert shown > 5


def test_forty_conversations_of_four_tenants_in_a_pool_for_four_never_mix(
    attack: Attack, tmp_path: Path
) -> None:
    """SECURITY-7: all begin alike, so a block that went astray would fit anywhere."""
    beginning = attack.prompt(30)
    conversations = [[*beginning, 3 + i, *attack.prompt(60)] for i in range(40)]
    alone = attack.server.engine
    streams = [
        alone.stream_generate(ids, max_tokens=12, temperature=0, ignore_eos=True, salt=f"{i}")
        for i, ids in enumerate(conversations)
    ]
    expected = [stream.result() for stream in streams]
    names = [f"tenant-{i}" for i in range(4)]
    gate, keys = open_gate(tmp_path, **{name: {} for name in names})
    bytes_per_block = alone.bytes_per_block
    with running_server(gate=gate, kv_memory=30 * bytes_per_block, lookahead_tokens=0) as server:

        def converse(i: int) -> None:
            body = {"prompt": conversations[i], "max_tokens": 12, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            headers = bearer(keys[names[i % 4]])
            status, _, reply = server.ask("POST", "/v1/completions", body, headers=headers)
            assert status == 200, reply
            assert tuple(reply["choices"][0]["token_ids"]) == expected[i].choices[0].token_ids, i

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(converse, [*range(40), *range(0, 40, 3)]))
        server.wait_until(server.at_rest)
        assert server.engine.stats().cache.evicted_blocks > 0
        assert server.engine.check() == []
