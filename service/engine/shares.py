"""What one tenant may have of an engine, and the account of what it had.

Knows weights, limits and numbers; whose turn it is by them, fairness.py says.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant may have of an engine; None of a limit is the engine's own."""

    weight: float = 1.0
    """Its part of the compute beside the others', when there is not enough for all."""
    max_running: int | None = None
    """Choices that run at once; a single request with more than that runs alone."""
    max_waiting: int | None = None
    """Choices in flight beyond those that may run at once."""

    def __post_init__(self) -> None:
        if not (isinstance(self.weight, (int, float)) and 1e-3 <= self.weight <= 1e3):
            raise InvalidConfig(f"weight is {self.weight!r}; wanted 0.001 to 1000")
        for name, low in (("max_running", 1), ("max_waiting", 0)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < low
            ):
                raise InvalidConfig(f"{name} is {value!r}; wanted a whole number from {low} on")


DEFAULT_SHARE = TenantShare()


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's interactive or batch work: what it has, what it had, and what that means."""

    tenant: str
    batch: bool
    share: TenantShare

    # How things stand: see fairness.py.
    level: float = 0.0
    ran: float = 0.0
    stride: float = 0.0
    """What its last step was charged with."""
    missed: float = 0.0
    """What it would have been due in the steps since, in which none of its prompts was computed."""
    rested: float = 0.0
    """How much rest ``ran`` has been lowered for."""
    started: int = 0
    """Which of all admissions its last one was."""
    stepped: int = 0
    """Which of all settlements its last one was."""
    passed: int = 0
    """Admissions of others since it had the turn and no room."""
    held: int = 0
    """Steps in a row that were kept short of its prompts."""
    committed: int = 0
    """Prompt tokens of its running sequences that are yet to be computed, as of the last survey."""
    step_tokens: int = 0
    """Tokens computed since they were last settled."""
    charged: int = 0
    """Of ``cost``, what is in the level."""

    # Now.
    num_waiting: int = 0
    num_running: int = 0
    places: int = 0
    """``num_running`` and the choices that are yet to be born."""

    # Since the start.
    requests: int = 0
    rejected: int = 0
    """Requests that were never let in."""
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_found_later: int = 0
    prompt_tokens_computed: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0

    @property
    def cost(self) -> int:
        """Tokens that it is charged for. What a preemption made it compute again is not its doing,
        and free."""
        return self.prompt_tokens_computed + self.generation_tokens

    @property
    def admission_level(self) -> float:
        """``level`` and what it is committed to."""
        return self.level + self.committed / self.share.weight
