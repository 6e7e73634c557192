"""Those who wait, tenant by tenant, and in which order a tenant's are tried.

Knows sequences, their ages and what the cache has for them; nothing of blocks, budgets or levels.

Inside a tenant the more urgent goes first (``priority``, lower first), then the longest cached
prefix, since its KV is cheapest now and may be evicted soon (RadixAttention, section 3). That alone
starves cold requests, so each sequence counts how many that came later and are no more urgent went
ahead of it; at ``MAX_SKIPS`` it goes before all of those, and while it cannot start, because it has
no room or another computes its prefix, none of them does. More urgent ones are not counted so, or a
backlog would soon outrank them; but after ``MAX_SKIPS`` of them in a row the oldest has its turn.
"""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache import PrefixCache
from radixkv.service.engine.request import Sequence
from radixkv.service.engine.shares import Account

MAX_SKIPS = 16
WINDOW = 128
"""Waiting sequences that are looked up in one step; of each tenant the oldest come first."""


class Queue:
    """The waiting sequences of one account, oldest first; holds no blocks at all (SCHED-3)."""

    __slots__ = ("account", "overtaken", "sequences")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.sequences: list[Sequence] = []
        self.overtaken = 0
        """Admissions of more urgent sequences than an older one, since the oldest was admitted."""

    def add(self, seq: Sequence) -> None:
        """Put ``seq`` at its place by age: a preempted one comes back before younger ones."""
        at = len(self.sequences)
        while at and self.sequences[at - 1].order > seq.order:
            at -= 1
        self.sequences.insert(at, seq)

    def barrier(self, priority: int) -> Sequence | None:
        """Return the sequence before which nobody younger, and no more urgent than ``priority``,
        may be admitted; None if there is none. O(WINDOW)."""
        if self.overtaken >= MAX_SKIPS:
            return self.sequences[0]
        for seq in self.sequences[:WINDOW]:
            if seq.skipped >= MAX_SKIPS and seq.priority <= priority:
                return seq
        return None

    def candidates(self, cache: PrefixCache, width: int) -> list[tuple[Sequence, int]]:
        """Return the ``width`` oldest in the order in which to try them, with their cached tokens.

        Touches nothing in the cache. O(width * look-up).
        """
        found = [(seq, cached_tokens(cache, seq)) for seq in self.sequences[:width]]
        if len(found) > 1:
            first = self.sequences[0] if self.overtaken >= MAX_SKIPS else None
            found.sort(
                key=lambda item: (
                    item[0] is not first,
                    item[0].priority,
                    0 if item[0].skipped >= MAX_SKIPS else 1,
                    0 if item[0].skipped >= MAX_SKIPS else -item[1],
                    item[0].order,
                )
            )
        return found

    def note_admitted(self, admitted: Sequence) -> None:
        """Count, for those of the window that came before ``admitted``, that it went ahead.

        It has been taken out already.
        """
        outranked = False
        for seq in self.sequences[:WINDOW]:
            if seq.order > admitted.order:
                break
            if admitted.priority < seq.priority:
                outranked = True
            else:
                seq.skipped += 1
        if outranked:
            self.overtaken += 1
        elif not self.sequences or self.sequences[0].order > admitted.order:
            self.overtaken = 0


class Waiting:
    """All that wait."""

    def __init__(self) -> None:
        self._queues: dict[Account, Queue] = {}
        self._num_queues = [0, 0]  # of interactive accounts, and of batch work
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue.sequences)

    @property
    def accounts(self) -> list[Account]:
        """Those of which somebody waits."""
        return list(self._queues)

    def beside(self, account: Account) -> bool:
        """Tell whether another account of the same kind of work waits."""
        return self._num_queues[account.batch] > (account in self._queues)

    def queue(self, account: Account) -> Queue | None:
        """Return the queue of an account of which somebody waits."""
        return self._queues.get(account)

    def add(self, seq: Sequence) -> None:
        """Let ``seq`` wait."""
        account = seq.request.account
        queue = self._queues.get(account)
        if queue is None:
            queue = self._queues[account] = Queue(account)
            self._num_queues[account.batch] += 1
        queue.add(seq)
        account.num_waiting += 1
        self._length += 1

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out; raises ValueError if it does not wait."""
        account = seq.request.account
        queue = self._queues.get(account)
        if queue is None:
            raise ValueError("no sequence of this tenant waits")
        queue.sequences.remove(seq)
        account.num_waiting -= 1
        self._length -= 1
        if not queue.sequences:
            del self._queues[account]
            self._num_queues[account.batch] -= 1


def cached_tokens(cache: PrefixCache, seq: Sequence) -> int:
    """Tokens of ``seq`` that an acquisition would find; at least one is left to compute."""
    if not seq.request.may_read_cache:
        return 0
    return cache.lookup(seq.request.identity, seq.key)
