"""Which prompts of a batch are in flight, what they share, and whether there is room for one more.

Knows the plan's steps and the engine's room in tokens and choices; nothing of lines, tasks or time.
A prompt may start when the prefix that it shares with those before it can be found in the cache, so
each prefix is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.config import EngineConfig
from radixkv.service.batch.plan import Step


@dataclass(slots=True, eq=False)
class Flight:
    """One prompt from its submission to its end."""

    step: Step
    beside_tokens: int
    """What it shares with the one in flight before it."""
    growth_tokens: int
    ready: bool = False
    """Its whole prompt can be found in the cache, or never will be."""


class Room:
    """What is in flight, in the order of the plan. Steps start in that order and end in any."""

    def __init__(self, config: EngineConfig, num_blocks: int, share: float) -> None:
        """``share``: of the engine's places and of its ``num_blocks``."""
        self._max_choices = max(1, int(share * config.max_num_seqs))
        self._pool_tokens = int(share * num_blocks * config.block_size)
        self._lookahead = max(config.lookahead_tokens, config.block_size)
        self._block_size = config.block_size
        self._order: list[Flight] = []
        self._path: list[tuple[int, Flight]] = []
        self._since = 0
        """The longest prefix of the last in flight that what comes next may share."""
        self._choices = 0

    def may_start(self, step: Step) -> bool:
        """Whether its prefix is there, and room for the rest; alone it may always."""
        provider = self._provider(step.shared_tokens)
        if provider is not None and not provider.ready:
            return False
        if not self._order:
            return True
        own = step.prompt.num_tokens - self._beside(step) + self._growth(step)
        return (
            self._choices + step.prompt.choices <= self._max_choices
            and self._taken() + own <= self._pool_tokens
        )

    def plan(self, step: Step) -> Flight:
        """Return its flight, for the next to be submitted; ``start`` it or ``pass_over`` it."""
        return Flight(step, self._beside(step), self._growth(step))

    def start(self, flight: Flight) -> None:
        """It was submitted."""
        step = flight.step
        if self._path:
            self._path[-1] = (step.shared_tokens, self._path[-1][1])
        self._path.append((step.prompt.num_tokens, flight))
        self._choices += step.prompt.choices
        self._order.append(flight)
        self._since = step.prompt.num_tokens

    def pass_over(self, step: Step) -> None:
        """It was refused: what comes next shares no more with those before than it did."""
        self._since = min(self._since, step.shared_tokens)

    def end(self, flight: Flight) -> None:
        """It is over, however it ended."""
        flight.ready = True
        self._choices -= flight.step.prompt.choices
        at = self._order.index(flight)
        del self._order[at]
        if at < len(self._order):
            behind = self._order[at]
            behind.beside_tokens = min(behind.beside_tokens, flight.beside_tokens)
        else:
            self._since = min(self._since, flight.beside_tokens)

    def _provider(self, shared_tokens: int) -> Flight | None:
        """Return what computes the last of the first ``shared_tokens``; cut the path to those.

        path    end 3: A    end 5: B    end 9: C        what shares 4 waits for B, and B is ready
                |--A--|      |-B-|       |--C--|        only after A
        """
        path = self._path
        while path and (path[-2][0] if len(path) > 1 else 0) >= shared_tokens:
            path.pop()
        return path[-1][1] if path else None

    def _beside(self, step: Step) -> int:
        """Return the tokens that it shares with those in flight."""
        return min(self._since, step.shared_tokens) if self._order else 0

    def _growth(self, step: Step) -> int:
        """Tokens of the pool that it will soon hold beyond its prompt: answers, and in each choice
        a copy of the block in which the prompt ends."""
        choices = step.prompt.choices
        answer_tokens = min(step.prompt.answer_tokens // choices, self._lookahead)
        return choices * (answer_tokens + 2 * self._block_size)

    def _taken(self) -> int:
        """Tokens that those in flight hold, or soon will: the edges of the tree of their prompts,
        and what grows below."""
        return sum(
            flight.step.prompt.num_tokens - flight.beside_tokens + flight.growth_tokens
            for flight in self._order
        )
