"""What callers give a session beside what they say: whole numbers, limits, how to sample.

Knows how these are written and what is refused; nothing of conversations.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.engine.grammar import take_grammar
from radixkv.service.engine.params import SamplingParams, sampling_params


def whole(name: str, value: object) -> int:
    """Return a whole number as an int, NumPy's too; raises InvalidRequest for anything else."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # that is what is found out
        except TypeError:
            pass
    raise InvalidRequest(f"{name} is {value!r:.100}; wanted a whole number", param=name)


def check_limits(ttl_s: float | None, budget_blocks: int | None) -> None:
    """Raise InvalidRequest for a time or a number of blocks that nothing can be held for."""
    if ttl_s is not None and (not isinstance(ttl_s, int | float) or not ttl_s > 0):
        raise InvalidRequest(f"ttl_s is {ttl_s!r}; wanted more than 0 seconds, or None")
    if budget_blocks is not None and whole("budget_blocks", budget_blocks) < 0:
        raise InvalidRequest(f"budget_blocks is {budget_blocks!r}; wanted 0 or more, or None")


def named(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sampling`` under the names of SamplingParams' fields: a ``regex`` for one time takes
    the place of a ``json_schema`` for all. Raises InvalidRequest if two such are given."""
    fields = dict(sampling)
    grammar = take_grammar(fields)
    if grammar is not None:
        fields["grammar"] = grammar
    return fields


def one_answer(fields: Mapping[str, Any]) -> SamplingParams:
    """Return the params of a turn, which has one answer. Raises InvalidRequest."""
    params = sampling_params(fields)
    if params.num_sequences != 1 or params.selects:
        raise InvalidRequest(
            "a session has one answer a turn, and no beams: fork it to have several", param="n"
        )
    return params
