"""Which of several finished choices are returned, and how choices are said that were held back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.service.engine.params import Choice, Delta

if TYPE_CHECKING:
    from radixkv.service.engine.request import Request


def best_of(request: Request) -> list[Choice]:
    """Return the ``n`` choices that are the likeliest a token, the best first, as choices 0 to n-1.

    Of equal ones that of the lower index goes first.
    """
    scored = []
    for seq, choice in request.drawn:
        score = seq.total / seq.output.num_tokens
        scored.append((-score, seq.index, replace(choice, cumulative_logprob=seq.total)))
    scored.sort(key=lambda item: item[:2])
    return [
        replace(choice, index=i, score=-score)
        for i, (score, _, choice) in enumerate(scored[: request.params.n])
    ]


def whole(choice: Choice) -> Delta:
    """Return all of a choice as one delta."""
    return Delta(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
