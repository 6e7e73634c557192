"""How often a tenant may look: alone at a time, with rests, and without holding up others."""

from __future__ import annotations

import asyncio

from radixkv.service.http.pace import MOST_REST_S, REST, Pace


class Clock:
    """Time that passes when it is told to, or slept for."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_one_looks_at_a_time_and_others_are_not_held_up() -> None:
    pace, inside = Pace(), []

    async def look(tenant: str, until: asyncio.Event) -> None:
        async with pace.turn(tenant):
            inside.append(tenant)
            await until.wait()

    done = asyncio.Event()
    looks = [asyncio.create_task(look(tenant, done)) for tenant in ("a", "a", "b")]
    while len(inside) < 2:
        await asyncio.sleep(0)
    assert sorted(inside) == ["a", "b"]
    done.set()
    await asyncio.wait_for(asyncio.gather(*looks), 10)
    assert sorted(inside) == ["a", "a", "b"]


async def test_a_look_is_followed_by_a_rest_in_proportion_up_to_a_limit() -> None:
    clock = Clock()
    pace = Pace(clock)
    for took_s, rest_s in ((0.001, REST * 0.001), (60.0, MOST_REST_S)):
        async with pace.turn("a"):
            clock.now_s += took_s
        assert abs(pace._turns["a"].free_s - clock.now_s - rest_s) < 1e-9
        clock.now_s += rest_s  # the next one need not wait


async def test_a_look_that_fails_rests_too_and_lets_the_next_in() -> None:
    pace = Pace()
    try:
        async with pace.turn("a"):
            raise ValueError
    except ValueError:
        pass
    async with asyncio.timeout(10), pace.turn("a"):
        pass
