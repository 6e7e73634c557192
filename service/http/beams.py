"""The request fields that look for more answers than they return: ``best_of`` and beam search.

They have vLLM's names, and those of a beam search transformers' meaning. Knows JSON and which field
makes sense with which; what a search is, the engine knows.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from radixkv.errors import InvalidRequest
from radixkv.service.engine.beams import MAX_LENGTH_PENALTY, MAX_WIDTH, BeamParams
from radixkv.service.engine.params import MAX_CHOICES, Choice


class BeamFields(BaseModel):
    """What OpenAI's generation routes accept for it.

    Such answers are said when all are there: a stream then carries each in one piece.
    """

    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Draw that many answers, or pursue that many beams, and return the `n` best: "
        "by log-probability a token, or by the beams' scores.",
    )
    use_beam_search: bool | None = Field(
        None,
        description="Search for the likeliest answers instead of drawing. Not with temperature "
        "(but 0 or 1), cuts, penalties, stop strings or a grammar.",
    )
    beam_width: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="Beams; default `best_of`, and else `n`."
    )
    length_penalty: float | None = Field(
        None,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="Score: log-probability over length to this power. Default 1.",
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="When a beam search is content, as in transformers. Default false."
    )

    def search(self, n: int) -> dict[str, Any]:
        """Return the engine's ``beams`` or ``best_of``, where asked for; raises InvalidRequest."""
        if not self.use_beam_search:
            for name, neutral in (
                ("beam_width", None),
                ("length_penalty", 1.0),
                ("early_stopping", False),
            ):
                value = getattr(self, name)
                if value is not None and value != neutral:
                    raise InvalidRequest(
                        f"{name} is only accepted with use_beam_search: true", param=name
                    )
            return {} if self.best_of in (None, n) else {"best_of": self.best_of}
        width = self.beam_width or self.best_of or n
        if self.best_of not in (None, width):
            raise InvalidRequest(
                f"beam_width is {width} and best_of {self.best_of}: two names of one thing",
                param="beam_width",
            )
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return {"beams": BeamParams(width, penalty, self.early_stopping or False)}


class ScoredChoice(TypedDict):
    """What a choice that was selected among others says of that; not in a stream.

    `cumulative_logprob`: the sum over its tokens, one that ended it included. `score`: that over
    their number, which for a beam is to the power of `length_penalty`.
    """

    cumulative_logprob: NotRequired[float]
    score: NotRequired[float]


def add_score(part: ScoredChoice, choice: Choice) -> None:
    """Say by what ``choice`` was selected, if it was."""
    if choice.score is not None and choice.cumulative_logprob is not None:
        part["cumulative_logprob"], part["score"] = choice.cumulative_logprob, choice.score
