"""Buckets and caps under a clock of our own: what is let through, what is refused, until when."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.engine.params import Usage
from radixkv.service.engine.stream import Stream
from radixkv.service.http.limits import Bucket, LimitReached, Room, TenantLimits
from radixkv.service.tenants import Tenant


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(clock: Clock, room: Room | None = None, **settings: Any) -> TenantLimits:
    return TenantLimits(Tenant("acme", **settings), room or Room(64, 1000), clock=clock)


def stream(choices: int = 1) -> Stream:
    return Stream("r", [5], choices, abort=lambda _: None, done=lambda _: None)


def generated(stream: Stream, tokens: int) -> None:
    stream.usage = Usage(1, tokens, 0)


def refused(call: Any) -> LimitReached:
    with pytest.raises(LimitReached) as e:
        call()
    assert (e.value.status, e.value.code) == (429, "rate_limit_exceeded")
    return e.value


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_at_its_rate() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1)
    assert bucket.wait_s(30, 10.0) == pytest.approx(20)
    assert bucket.left(10.0) == 10 and bucket.full_in_s(10.0) == pytest.approx(50)
    assert bucket.left(1000.0) == 60


def test_over_ten_minutes_no_more_passes_than_the_rate_allows() -> None:
    bucket, passed = Bucket(100, 0.0), 0
    for tick in range(6000):
        now = tick / 10
        if bucket.wait_s(7, now) == 0:
            bucket.take(7, now)
            passed += 7
    assert passed <= 100 + 10 * 100
    assert passed >= 10 * 100 - 14


def test_what_costs_more_than_a_minutes_worth_passes_when_full_and_is_paid_for() -> None:
    bucket = Bucket(100, 0.0)
    assert bucket.wait_s(250, 0.0) == 0
    bucket.take(250, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(151 * 0.6)
    assert bucket.wait_s(250, 0.0) == pytest.approx(250 * 0.6), "it must be full again"


def test_too_many_requests_are_refused_with_the_limit_and_the_time(clock: Clock) -> None:
    mine = limits(clock, requests_per_minute=2)
    mine.count_request()
    mine.count_request()
    error = refused(mine.count_request)
    assert error.limit == {"name": "requests_per_minute", "value": 2, "retry_after_s": 30.0}
    assert error.retry_after_s == 30
    assert str(error) == (
        "Too many requests (limit requests_per_minute: 2). Please try again in 30s."
    )
    clock.now = 30
    mine.count_request()
    refused(mine.count_request)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 59, 60, 61, 1000])
def test_exactly_so_many_requests_pass_in_a_minute_and_the_next_when_it_is_said(
    clock: Clock, n: int
) -> None:
    """At the border itself: not one more, not a moment too late or too early."""
    mine = limits(clock, requests_per_minute=n)
    clock.now = 1e6 / 7  # a machine that has been up for a while
    for _ in range(n):
        mine.count_request()
    assert mine.headers()["x-ratelimit-remaining-requests"] == "0"
    for _ in range(50):
        wait_s = refused(mine.count_request).limit["retry_after_s"]
        assert wait_s == pytest.approx(60 / n, abs=0.0011)
        clock.now += wait_s - 0.0011
        refused(mine.count_request)
        clock.now += 0.0011
        mine.count_request()


def test_after_a_quiet_minute_there_is_a_minutes_worth_again_and_never_more(clock: Clock) -> None:
    mine = limits(clock, requests_per_minute=5)
    for quiet_s in (60.0, 61.0, 3600.0, 1e9):
        for _ in range(5):
            mine.count_request()
        refused(mine.count_request)
        clock.now += quiet_s
    for _ in range(4):
        mine.count_request()
    clock.now += 59.999  # all but a hair of a minute, of which four had been used
    assert mine.headers()["x-ratelimit-remaining-requests"] == "5"
    for _ in range(5):
        mine.count_request()
    clock.now += 11.99
    refused(mine.count_request)


def test_a_prompt_of_exactly_what_is_left_passes_and_of_one_token_more_does_not(
    clock: Clock,
) -> None:
    mine = limits(clock, tokens_per_minute=100)
    mine.admit(60, 1)
    assert refused(lambda: mine.admit(41, 1)).limit["retry_after_s"] == pytest.approx(0.6)
    mine.admit(40, 1)
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "0"
    wait_s = refused(lambda: mine.admit(1, 1)).limit["retry_after_s"]
    clock.now += wait_s
    mine.admit(1, 1)
    answer = stream()
    mine.enter(answer)
    generated(answer, 200)  # more than there is: what follows has to wait until it is paid for
    refused(lambda: mine.admit(1, 1))
    clock.now += 120
    assert refused(lambda: mine.admit(1, 1)).limit["retry_after_s"] == pytest.approx(0.6)
    clock.now += 0.6
    mine.admit(1, 1)


def test_prompts_are_charged_when_submitted_and_answers_as_they_grow(clock: Clock) -> None:
    mine = limits(clock, tokens_per_minute=100)
    mine.admit(40, 1)
    answer = stream()
    mine.enter(answer)
    generated(answer, 30)
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "30"
    error = refused(lambda: mine.admit(50, 1))
    assert error.limit["name"] == "tokens_per_minute"
    assert error.limit["retry_after_s"] == pytest.approx(12)
    generated(answer, 45)
    mine.leave(answer)
    mine.leave(answer)
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "15", "each token once"


def test_a_refused_prompt_costs_nothing_and_one_that_was_not_run_is_given_back(
    clock: Clock,
) -> None:
    mine = limits(clock, tokens_per_minute=100)
    mine.admit(60, 1)
    refused(lambda: mine.admit(60, 1))
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "40"
    mine.give_back(60)
    assert mine.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_no_more_choices_are_in_flight_than_may_run_and_wait(clock: Clock) -> None:
    mine = limits(clock, max_concurrent=2, max_queued=3)
    flying = [stream() for _ in range(5)]
    for one in flying:
        mine.admit(1, 1)
        mine.enter(one)
    error = refused(lambda: mine.admit(1, 1))
    assert error.limit == {"name": "max_queued", "value": 3, "retry_after_s": 1.0}
    assert "5 of your choices run or wait, and 5 may" in str(error)
    mine.leave(flying[0])
    mine.admit(1, 1)
    with pytest.raises(InvalidRequest, match="your max_concurrent is 2"):
        mine.admit(1, 3)


def test_without_a_queue_the_cap_is_what_may_run(clock: Clock) -> None:
    mine = limits(clock, max_concurrent=2, max_queued=0)
    mine.enter(stream(2))
    assert refused(lambda: mine.admit(1, 1)).limit["name"] == "max_concurrent"


def test_without_caps_a_tenant_fills_its_share_and_a_single_request_always_passes(
    clock: Clock,
) -> None:
    mine = limits(clock, Room(64, 4))
    mine.admit(1, 8)
    mine.enter(stream(3))
    mine.admit(1, 1)
    assert refused(lambda: mine.admit(1, 2)).limit["value"] == 4


def test_limits_that_change_keep_what_was_used(clock: Clock) -> None:
    mine = limits(clock, requests_per_minute=10, tokens_per_minute=100)
    for _ in range(8):
        mine.count_request()
    mine.change(Tenant("acme", requests_per_minute=20), Room(64, 1000))
    assert mine.headers() == {
        "x-ratelimit-limit-requests": "20",
        "x-ratelimit-remaining-requests": "12",
        "x-ratelimit-reset-requests": "24s",
    }
    mine.change(Tenant("acme", requests_per_minute=5), Room(64, 1000))
    refused(mine.count_request)


def test_times_are_written_as_openai_writes_them(clock: Clock) -> None:
    shown = {}
    for per_minute, used in ((6000, 2), (60, 30), (1, 1), (60, 60)):
        mine = limits(clock, requests_per_minute=per_minute)
        for _ in range(used):
            mine.count_request()
        shown[per_minute, used] = mine.headers()["x-ratelimit-reset-requests"]
    assert list(shown.values()) == ["20ms", "30s", "1m0s", "1m0s"]
