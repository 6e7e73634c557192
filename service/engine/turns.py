"""Whose turn it is to start a sequence, again and again within one step.

Knows levels and who was passed; nothing of how they came about. A turn costs O(log accounts), since
thousands of tenants may wait and only the level of whoever had the turn changes meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.service.engine.fairness import Lane
    from radixkv.service.engine.shares import Account

MAX_PASSES = 16
"""Admissions of others before a tenant that has the turn and no room for its next sequence; then
nobody starts until it has."""


class Turns:
    """Accounts of one lane that wait: who was passed too often first, then the lowest level, then
    who started longest ago. Whoever is below the lane's floor is lifted to it."""

    def __init__(self, lane: Lane, waiting: Collection[Account]) -> None:
        """Take accounts whose commitments are known, unless it is only one. O(accounts)."""
        self._lane = lane
        self._accounts = list(waiting)
        if len(self._accounts) == 1:  # nobody to compare with
            (account,) = self._accounts
            lane.level = account.level = max(lane.level, account.level)
        else:
            for account in self._accounts:
                account.level += max(0.0, lane.level - account.admission_level)
        self._heap = [(*_place(account), i) for i, account in enumerate(self._accounts)]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def alone(self) -> bool:
        """Whether only one account is left."""
        return len(self._heap) == 1

    def next(self) -> Account:
        """Return whose turn it is; the floor rises to its level, if that is the lowest."""
        account = self._accounts[self._heap[0][-1]]
        if len(self._accounts) > 1 and account.passed < MAX_PASSES:
            self._lane.level = max(self._lane.level, account.admission_level)
        return account

    def had(self) -> None:
        """Note that whoever ``next`` named has had a turn, and may have another."""
        at = self._heap[0][-1]
        heapq.heapreplace(self._heap, (*_place(self._accounts[at]), at))

    def drop(self) -> None:
        """Let whoever ``next`` named have no other turn in this step."""
        heapq.heappop(self._heap)


def _place(account: Account) -> tuple[bool, float, int]:
    return account.passed < MAX_PASSES, account.admission_level, account.started
