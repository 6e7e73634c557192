"""What may be asked of a beam search, and what cannot be combined with it; nothing of how it goes.

The meaning of the parameters is that of transformers' ``generate(num_beams=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from radixkv.errors import InvalidRequest

if TYPE_CHECKING:
    from radixkv.service.engine.params import SamplingParams

MAX_WIDTH = 128
MAX_LENGTH_PENALTY = 5.0
"""Either way: more would carry the scores of long answers out of float32."""

EarlyStopping = Literal[True, False, "never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How wide to search, and when to be content. Raises InvalidRequest naming the field."""

    width: int
    """Answers that are pursued at once; ``n`` of them are returned, the best first."""
    length_penalty: float = 1.0
    """An answer's score is its log-probability over its length to this power. Log-probabilities are
    negative, so above 0 longer answers do better, below 0 shorter ones."""
    early_stopping: EarlyStopping = False
    """When to end, once ``width`` answers are finished. True: at once. False: when the best that
    runs would, at its present length, not beat the worst of them. "never": when it could not even
    at the length that suits it best."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                said = "beam_width" if name == "width" else name
                raise InvalidRequest(
                    f"{said} is {getattr(self, name)!r}; wanted {wanted}", param=said
                )

        whole = isinstance(self.width, int) and not isinstance(self.width, bool)
        need(whole and 1 <= self.width <= MAX_WIDTH, "width", f"1 to {MAX_WIDTH}")
        limit = MAX_LENGTH_PENALTY
        number = isinstance(self.length_penalty, int | float)
        need(
            number and -limit <= self.length_penalty <= limit,
            "length_penalty",
            f"{-limit:g} to {limit:g}",
        )
        valid = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        need(valid, "early_stopping", 'true, false or "never"')

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest if ``params`` ask for what a beam search does not do.

        It follows the model's own probabilities, so whatever else would change them is refused
        rather than ignored. A seed is harmless, for nothing is drawn; so is a temperature of 0 or
        1, which clients send.
        """
        if params.n > self.width:
            raise InvalidRequest(
                f"n is {params.n}; a beam search of width {self.width} has no more answers",
                param="n",
            )
        for name, neutral in (
            ("temperature", (0.0, 1.0)),
            ("top_p", (1.0,)),
            ("top_k", (0,)),
            ("min_p", (0.0,)),
            ("presence_penalty", (0.0,)),
            ("frequency_penalty", (0.0,)),
            ("repetition_penalty", (1.0,)),
            ("logit_bias", ({},)),
            ("stop", ((),)),
            ("grammar", (None,)),
            ("best_of", (None,)),
        ):
            value = getattr(params, name)
            if value not in neutral:
                what = "structured output" if name == "grammar" else name
                raise InvalidRequest(
                    f"{what} cannot be combined with beam search, which follows the model's own "
                    "probabilities to eos, a stop token or max_tokens; leave it out",
                    param=name,
                )
