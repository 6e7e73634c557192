"""Whose turn it is among tenants: deficit longest-prefix-match.

Knows tenants, weights and tokens; nothing of sequences, blocks or time.

A tenant's *level* is what it has been served (prompt tokens computed, answer tokens drawn) and what
its admitted prompts will still be, divided by its weight. The tenant of the lowest level that waits
starts sequences next, longest cached prefix first, until a *quantum* of tokens is used up; a cached
token costs nothing, so what can share goes ahead inside its tenant and pays for nobody else's
misses ("Locality-aware Fair Scheduling in LLM Serving", 2025). That is deficit round robin
(Shreedhar & Varghese, 1995) with the deficits written as levels, so that no round has to be walked:

    floor                 floor + quantum
      |  the lowest level     |
      |  that waits           |            credit = (floor + quantum - level) * weight

    A tenant that comes back is lifted to the floor: nobody saves up more than one quantum.
    What it had while nobody else waited counts up to floor + quantum: nobody pays for idle hours.
    Of two that wait all the time neither's level is ahead by more than a quantum, one prompt and
    what its running sequences say meanwhile; so what they are served converges to the weights.

The tokens of a step are shared out by the same rule with levels of their own (*ran*: all that was
computed), or a tenant whose long prompts were all admitted while it was alone would keep every step
to itself. Their floor lies a *burst* below whoever ran least of those that still have prompts to
compute when a step is over; so the prompt of one that asks now and then is computed in one go, in
nearly the steps that it would take alone, and not in turns with those of one that always asks:

    floor                              floor + burst                    floor + 2 bursts
      |  lifted to here: who comes back   |  ran least of who always asks   |  no debt is larger

Nobody saves up or owes more than a burst; what could have been computed in hours when nobody had
anything to compute is taken off a lead; and who was passed for longer than it can have owed goes
before newcomers, or enough of them would pass it for ever. The step in which the prompt of one that
comes back ends is not filled up with others': its first token comes when that step is over.
Interactive work and batch work are counted apart, as two lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from radixkv.service.engine.shares import DEFAULT_SHARE, Account, TenantShare
from radixkv.service.engine.turns import Turns

MAX_HELD = 4
"""Steps in a row that may be kept short of a tenant's prompts, for others' to end sooner."""

BURST_TOKENS = 2048
"""Prompt tokens of one who asks now and then that go before those of one who always asks; per unit
of weight."""


@dataclass(slots=True)
class Lane:
    """The floors of those that compete for interactive, or for batch work."""

    level: float = 0.0
    ran: float = 0.0


@dataclass(slots=True)
class Fairness:
    """The accounts of all tenants, two each. Used by the engine thread only."""

    quantum: int
    """Tokens per unit of weight."""
    burst: int = BURST_TOKENS
    """The same, of a step's tokens: see the module."""
    changed: set[Account] = field(default_factory=set)
    """Accounts of which a number is new; whoever shows them empties it."""
    _accounts: dict[tuple[str, bool], Account] = field(default_factory=dict)
    _shares: dict[str, TenantShare] = field(default_factory=dict)
    _lanes: tuple[Lane, Lane] = field(default_factory=lambda: (Lane(), Lane()))
    _unfinished: frozenset[Account] = frozenset()
    """Those of whom a prompt was yet to be computed when the last step was over."""
    _rested: float = 0.0
    """Tokens that could have been computed while there were none to compute."""
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def account(self, tenant: str, batch: bool = False) -> Account:
        """Return the account of a tenant's interactive or batch work, opened if need be."""
        account = self._accounts.get((tenant, batch))
        if account is None:
            share = self._shares.get(tenant, DEFAULT_SHARE)
            account = Account(tenant, batch, share, rested=self._rested)
            self._accounts[tenant, batch] = account
        return account

    def of(self, tenant: str) -> list[Account]:
        """Return the accounts that a tenant has."""
        both = (self._accounts.get((tenant, batch)) for batch in (False, True))
        return [account for account in both if account is not None]

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def set_share(self, tenant: str, share: TenantShare) -> None:
        """Give ``tenant`` another share from now on; what it had stays charged as it was."""
        self._shares[tenant] = share
        for account in self.of(tenant):
            account.share = share

    def clear(self) -> None:
        """Close all accounts, which nobody may be using; shares stay as they are."""
        self._accounts.clear()
        self.changed.clear()
        self._lanes = (Lane(), Lane())
        self._unfinished = frozenset()

    def has_place(self, account: Account, num_choices: int) -> bool:
        """Tell whether the tenant's own limit lets ``num_choices`` more run; the first always."""
        limit = account.share.max_running
        if limit is None:
            return True
        taken = sum(other.places for other in self.of(account.tenant))
        return not taken or taken + num_choices <= limit

    # -- who starts next ---------------------------------------------------------------------------

    def turns(self, waiting: Collection[Account]) -> Turns:
        """Return whose turn it is, again and again, among accounts of one lane that wait.

        Their commitments are known, unless it is only one. O(accounts).
        """
        batch = any(account.batch for account in waiting)
        return Turns(self._lanes[batch], waiting)

    def note_start(self, account: Account, num_tokens: int) -> None:
        """``account`` has started a sequence with ``num_tokens`` of its prompt to compute."""
        account.committed += num_tokens
        account.started = next(self._serial)
        account.passed = 0

    # -- whose tokens are computed first -----------------------------------------------------------

    def rest(self, num_tokens: float) -> None:
        """So many tokens could have been computed by now, and nobody had any.

        Whoever ran ahead of others took nothing from them as far as there was time for theirs too.
        """
        self._rested += num_tokens

    def _bring_up_to_date(self, account: Account) -> None:
        """Lower a lead by the rest there was, and lift who comes back to the floor."""
        rest, floor = self._rested - account.rested, self._lanes[account.batch].ran
        account.rested = self._rested
        if account not in self._unfinished:
            account.ran = max(account.ran - rest / account.share.weight, floor)

    def compute_order(self, accounts: Iterable[Account]) -> list[Account]:
        """Return accounts that have prompts to compute, in the order in which to do so.

        Interactive ones first; then who ran least for its weight, then who ran longest ago.
        """
        competing = list(accounts)
        for account in competing:
            self._bring_up_to_date(account)
        competing.sort(key=lambda a: (a.batch, a.ran, a.stepped))
        return competing

    def is_ahead(self, other: Account, account: Account) -> bool:
        """Tell whether prompts of ``other`` are computed before those of ``account``."""
        if other.batch is not account.batch:
            return account.batch
        self._bring_up_to_date(account)
        self._bring_up_to_date(other)
        return (other.ran, other.stepped) <= (account.ran, account.stepped)

    def lengthens(self, other: Account, account: Account) -> bool:
        """Tell whether ``other`` may add to a step in which a prompt of ``account``, which comes
        before it, ends.

        Not if it ran more than a quantum further: its tokens wait for the next step, which costs it
        what a step costs beside its tokens. But not for more than MAX_HELD steps in a row.
        """
        if (
            other.batch is not account.batch
            or other.ran - account.ran <= self.quantum
            or other.held >= MAX_HELD
        ):
            return True
        other.held += 1
        return False

    # -- what it cost ------------------------------------------------------------------------------

    def settle(
        self,
        beside: Callable[[Account], bool],
        unfinished: Collection[Account] = (),
        passed: Collection[Account] = (),
    ) -> None:
        """Charge what the changed accounts had since the last time.

        ``beside`` tells whether somebody else waits: if not, an account kept nobody from starting,
        and its level rises up to a quantum beyond the floor only. ``unfinished`` had prompts to
        compute, and still have; of ``passed``, some of them, none was computed.
        """
        now = next(self._serial)
        ran: tuple[list[Account], list[Account]] = [], []
        for account in self.changed:
            if account.cost != account.charged:
                level = account.level + (account.cost - account.charged) / account.share.weight
                if not beside(account):
                    floor = self._lanes[account.batch].level
                    level = min(level, max(account.level, floor + self.quantum))
                account.level, account.charged = level, account.cost
            if account.step_tokens:
                ran[account.batch].append(account)
        for batch in (False, True):
            if ran[batch]:
                self._settle_step(
                    self._lanes[batch],
                    ran[batch],
                    [account for account in unfinished if account.batch is batch],
                    [account for account in passed if account.batch is batch],
                )
                for account in ran[batch]:
                    account.step_tokens, account.stepped = 0, now
        self._unfinished = frozenset(unfinished)

    def _settle_step(
        self, lane: Lane, had: list[Account], left: list[Account], passed: list[Account]
    ) -> None:
        """Charge those of a lane that had tokens of a step, and let its floor rise."""
        for account in had:
            self._bring_up_to_date(account)
            account.stride = account.step_tokens / account.share.weight
            account.ran += account.stride
            if account not in passed:
                account.missed = 0.0
        least = min(a.ran for a in left) if left else max(a.ran for a in had)
        lane.ran = max(lane.ran, least - self.burst)
        if left:
            for account in had:
                account.ran = min(account.ran, least + self.burst + account.stride)
        if passed:
            weights = sum(account.share.weight for account in {*had, *left})
            due = sum(account.step_tokens for account in had) / weights
            for account in passed:
                account.missed += due
                if account.missed > self.burst + account.stride:  # more than it could have owed
                    lane.ran = max(lane.ran, account.ran + 1.0)
