"""Whose turn it is to give up a block, where several have some.

Knows accounts, how many blocks each has, may keep and was promised, and since when its oldest leaf
is unused; nothing of tokens or of how a leaf is cut.

First comes the account that is most over its quota, then the one whose leaf is the least recently
used among those above their floors, and last, when nothing else is left, that of the one who needs
the room. Costs O(log accounts) a leaf, and nothing while there is a single account.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixkv.nodes import Node

if TYPE_CHECKING:
    from radixkv.accounts import Account

_NEVER = -(1 << 80)  # no leaf's entry lies before it
_ALWAYS = 1 << 80  # and each lies before this


class Victims:
    """Two lines of accounts, each a heap of bounds that are corrected only when they come up.

    *Common* line: an account stands there by what ``leaves.promised`` says, which is never later
    than its oldest leaf; a leaf that is queued before that calls ``place``. An account without
    unheld leaves promises ``_ALWAYS`` and does not stand there, nor does one at its floor
    (``aside``), which promises ``_NEVER``. *Over* line: by ``excess``, never less than the blocks
    that it has over its quota while any is evictable.
    """

    __slots__ = ("_accounts", "_common", "_over", "only")

    def __init__(self) -> None:
        self.only: Account | None = None  # the one account, while there is just one
        self._accounts: list[Account] = []
        self._common: list[tuple[int, int]] = []  # (promised, index of the account)
        self._over: list[tuple[int, int]] = []  # (-excess, index of the account)

    def admit(self, account: Account) -> None:
        """Take notice of a new account; there is nothing in it yet."""
        self._accounts.append(account)
        if len(self._accounts) == 1:
            self.only = account
            account.leaves.promised = _NEVER
            return
        if self.only is not None:
            first, self.only = self.only, None
            self._stand(first)
        self._stand(account)

    def readmit(self, accounts: Iterable[Account]) -> None:
        """Begin anew with all ``accounts``, each without a leaf."""
        self._accounts, self.only = [], None
        for account in accounts:
            self.admit(account)

    def clear(self) -> None:
        """Empty both lines."""
        self._common, self._over = [], []
        for account in self._accounts:
            account.excess, account.aside = 0, False

    def _stand(self, account: Account) -> None:
        account.leaves.on_earlier = lambda: self.place(account)
        self.place(account)

    def place(self, account: Account) -> None:
        """Let ``account`` stand in the common line by its oldest leaf, if it has any."""
        entry = account.leaves.first()
        account.leaves.promised = _ALWAYS if entry is None else entry
        if entry is None:
            return
        heapq.heappush(self._common, (entry, account.index))
        if len(self._common) > 2 * len(self._accounts) + 64:
            standing = [a for a in self._accounts if _NEVER < a.leaves.promised < _ALWAYS]
            self._common = [(a.leaves.promised, a.index) for a in standing]
            heapq.heapify(self._common)

    def note(self, account: Account, above: int) -> None:
        """Take notice that ``account`` has ``above`` blocks above its floor now."""
        if account.aside and (above or not account.floor):
            account.aside = False
            self.place(account)
        excess = 0 if account.quota is None else account.blocks - account.quota
        if excess > account.excess and account.evictable:
            account.excess = excess
            heapq.heappush(self._over, (-excess, account.index))
            if len(self._over) > 2 * len(self._accounts) + 64:
                self._over = [(-a.excess, a.index) for a in self._accounts if a.excess]
                heapq.heapify(self._over)

    def next(self, taker: Account) -> tuple[Account, Node, int]:
        """Return who is next, his leaf, and how many blocks he may give before we ask again."""
        if self.only is not None:
            return self.only, self.only.leaves.oldest(), self.only.evictable
        if self._over:
            account, most = self._most_over()
            if account is not None:
                return account, account.leaves.oldest(), most
        common = self._common
        while common:
            entry, index = common[0]
            account = self._accounts[index]
            if entry != account.leaves.promised:  # it has got another place
                heapq.heappop(common)
                continue
            leaf = account.leaves.peek()
            if leaf is None:
                heapq.heappop(common)
                account.leaves.promised = _ALWAYS
                continue
            above = account.blocks - account.floor
            if above <= 0:
                heapq.heappop(common)
                account.leaves.promised, account.aside = _NEVER, True
                continue
            if leaf.entry > entry:
                account.leaves.promised = leaf.entry
                heapq.heapreplace(common, (leaf.entry, index))
                if common[0][0] != leaf.entry:
                    continue
            return account, leaf, above
        return taker, taker.leaves.oldest(), taker.evictable

    def _most_over(self) -> tuple[Account | None, int]:
        """Return who is most over his quota, and by how much more than the next."""
        over = self._over
        while over:
            bound, index = over[0]
            account = self._accounts[index]
            quota = account.quota
            if -bound != account.excess:
                heapq.heappop(over)
                continue
            excess = 0 if quota is None or not account.evictable else account.blocks - quota
            if excess <= 0:
                heapq.heappop(over)
                account.excess = 0
            elif excess < -bound:
                account.excess = excess
                heapq.heapreplace(over, (-excess, index))
            else:
                second = max((-bound for bound, _ in over[1:3]), default=0)
                return account, max(1, excess - second)
        return None, 0

    def check(self, accounts: Iterable[Account]) -> list[str]:
        """Return each broken invariant in words. O(accounts)."""
        wrong = []
        common, over = set(self._common), set(self._over)
        for account in accounts:
            name, promised = f"the account of {account.tenant!r}", account.leaves.promised
            if self._accounts[account.index] is not account:
                wrong.append(f"{name} has lost its place in the book")
            first = account.leaves.first()
            if self.only is None and not account.aside:
                if promised == _NEVER or (first is not None and promised > first):
                    wrong.append(f"{name} stands too late in line")
                if promised != _ALWAYS and (promised, account.index) not in common:
                    wrong.append(f"{name} does not stand in line")
            if account.aside and account.blocks > account.floor:
                wrong.append(f"{name} is above its floor and stands aside")
            over_by = 0 if account.quota is None else account.blocks - account.quota
            if account.evictable and over_by > account.excess:
                wrong.append(f"{name} is more over its quota than its place says")
            if account.excess and (-account.excess, account.index) not in over:
                wrong.append(f"{name} has lost its place among those over their quotas")
        return wrong
