"""How an engine in a process of its own is asked things: a JSON line in, a JSON line out.

Runs under whatever Python the engine lives in, so it imports the standard library alone.

    {"op": "start", "model": ..., "threads": ..., ...}      -> what it is: version, precision, notes
    {"op": "generate", "prompts": [[...]], "tokens": n}     -> {"wall_s", "ttft_s", "ids", "cached"}
    anything else                                           -> the engine's own (``step_share``)
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[[Mapping[str, Any]], dict[str, Any]]


def serve(operations: Mapping[str, Operation], at_end: Callable[[], object] = lambda: None) -> None:
    """Answer requests from stdin until it closes, then call ``at_end`` and end the process.

    What libraries print goes to stderr instead.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = operations[request["op"]](request)
            except Exception as error:  # the asking side decides what it means
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()  # breaks if the asking side is gone, which is the end as well
    finally:
        at_end()
        # Some engines' threads outlive an ordinary end; nothing here needs one.
        os._exit(0)


def answer(
    wall_s: float, ttft_s: list[float], ids: list[list[int]], cached: list[int] | None = None
) -> dict[str, Any]:
    """The answer to ``generate``; times count from just before the first prompt was handed over."""
    return {"wall_s": wall_s, "ttft_s": ttft_s, "ids": ids, "cached": cached}
