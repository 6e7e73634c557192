"""KV in one stretch a request, reserved when it starts: how it was done before paging.

Requests start in the order of arrival, as soon as the buddy allocator has room for the next one;
all running ones grow by a token a step (iteration-level scheduling: Orca, 2022). Three ways to say
how much room: the longest that may ever be, the next power of two of the answer, the very length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from radixkv.simulate.buddy import BuddyAllocator
from radixkv.simulate.lengths import Workload
from radixkv.simulate.usage import Meter, Usage


def _longest(prompt: int, answer: int, most: int) -> int:
    return most


def _power_of_two(prompt: int, answer: int, most: int) -> int:
    return min(prompt + (1 << (answer - 1).bit_length()), most)


def _exact(prompt: int, answer: int, most: int) -> int:
    return prompt + answer


RESERVATIONS: dict[str, Callable[[int, int, int], int]] = {
    "max": _longest,
    "pow2": _power_of_two,
    "oracle": _exact,
}


def simulate(work: Workload, strategy: str, capacity: int, max_tokens: int = 2048) -> Usage:
    """Run ``work`` in ``capacity`` slots; ``strategy`` is one of RESERVATIONS.

    The first tenth of the requests, and the time when none waits any more, are not counted where
    there is other time. O(requests * log).
    """
    reserve, meter, buddy = (
        RESERVATIONS[strategy],
        Meter(strategy, capacity),
        BuddyAllocator(capacity),
    )
    n = len(work.prompts)
    running: list[tuple[int, int, int, int]] = []  # end, address, reserved slots, final tokens
    now, at = 0, 0
    final = room = ends = 0  # sums over the running ones
    while at < n or running:
        while at < n:
            prompt, answer = int(work.prompts[at]), int(work.answers[at])
            slots = max(reserve(prompt, answer, max_tokens), prompt + answer)
            address = buddy.take(slots)
            if address is None:
                if not running:
                    raise ValueError(f"a request of {slots} slots never fits {capacity}")
                break
            heapq.heappush(running, (now + answer, address, slots, prompt + answer))
            final, room, ends = final + prompt + answer, room + slots, ends + now + answer
            at += 1
        end = running[0][0]
        # Each lacks (its end - now) tokens, and one less each step.
        lacking = ends - len(running) * (now + (end - now) / 2)
        meter.add(
            end - now,
            steady=n // 10 <= at < n,
            tokens=final - lacking,
            reserved=lacking,
            internal=room - final,
            batch=len(running),
        )
        now = end
        while running and running[0][0] == now:
            ended, address, slots, total = heapq.heappop(running)
            buddy.give_back(address, slots)
            final, room, ends = final - total, room - slots, ends - ended
    return meter.usage()
