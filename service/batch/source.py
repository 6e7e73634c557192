"""Reads a batch's file twice: to plan it and refuse what is no request, then in the plan's order.

Knows lines, what they ask and what was answered before; nothing of what is in flight. The file may
be larger than memory: a line is parsed again when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from radixkv.errors import RadixKVError
from radixkv.service.batch.asks import Ask, Asks
from radixkv.service.batch.lines import Line, LineFault, line_at, read_lines
from radixkv.service.batch.plan import Plan, Step
from radixkv.service.batch.results import Done, digest, error_record, fault_record
from radixkv.service.batch.tally import BatchStopped, Tally

_READ_AHEAD = 16
_KNOWN_ASKS = 64


class Source:
    """The lines of one file. ``refuse`` is given the record of each line that gets an error."""

    def __init__(
        self,
        path: Path,
        asks: Asks,
        *,
        done: Done,
        tally: Tally,
        refuse: Callable[[dict[str, Any]], None],
        url: str | None,
    ) -> None:
        self._path, self._asks, self._done = path, asks, done
        self._tally, self._refuse = tally, refuse
        self._url = url
        self._known: OrderedDict[int, Ask] = OrderedDict()
        self.stopping = False
        """Set from any thread: read no further."""

    def read(self, plan: Plan) -> None:
        """Plan what there is to do, and refuse what is no request. Takes its time: for a thread."""
        tally, seen = self._tally, set[bytes]()
        with self._path.open("rb") as file:
            for item in read_lines(file):
                if self.stopping:
                    return
                tally.lines += 1
                try:
                    if isinstance(item, LineFault):
                        if item.custom_id is not None:
                            seen.add(digest(item.custom_id))
                        raise item
                    self._check(item, seen)
                except LineFault as fault:
                    if self._done.has_fault(fault.number):
                        tally.skipped += 1
                    else:
                        self._refuse(fault_record(fault))
                    continue
                if self._done.has(item.custom_id):
                    tally.skipped += 1
                    continue
                try:
                    for prompt in self._asks.prompts(self._asks.parse(item)):
                        plan.add(prompt)
                except Exception as e:
                    self._refuse(error_record(item.custom_id, e))

    def _check(self, line: Line, seen: set[bytes]) -> None:
        name = digest(line.custom_id)
        if name in seen:
            raise LineFault(
                line.number,
                "duplicate_custom_id",
                f"custom_id {line.custom_id[:80]!r} was used by a line before",
                custom_id=line.custom_id,
            )
        seen.add(name)
        if self._url is not None and line.url != self._url:
            raise LineFault(
                line.number,
                "mismatched_url",
                f"url is {line.url!r}; the batch's endpoint is {self._url!r}",
                custom_id=line.custom_id,
            )

    async def feed(self, plan: Plan) -> AsyncIterator[tuple[Ask, Step]]:
        """Yield the steps of the plan with their lines, read once more from the file."""
        with self._path.open("rb") as file:
            steps, refused = iter(plan), set[int]()
            while chunk := await asyncio.to_thread(self._next, steps, file):
                for ask, step in chunk:
                    if isinstance(ask, Ask):
                        yield ask, step
                    elif step.prompt.line not in refused:  # such as one of an adapter that is gone
                        refused.add(step.prompt.line)
                        self._refuse(ask)

    def _next(
        self, steps: Iterator[Step], file: BinaryIO
    ) -> list[tuple[Ask | dict[str, Any], Step]]:
        found: list[tuple[Ask | dict[str, Any], Step]] = []
        for step in islice(steps, _READ_AHEAD):
            number = step.prompt.line
            ask = self._known.get(number)
            if ask is None:
                try:
                    line = line_at(file, number, step.prompt.offset)
                except LineFault as fault:
                    raise BatchStopped(f"{self._path} was changed: {fault}") from None
                try:
                    ask = self._known[number] = self._asks.parse(line)
                except RadixKVError as e:
                    found.append((error_record(line.custom_id, e), step))
                    continue
                if len(self._known) > _KNOWN_ASKS:
                    self._known.popitem(last=False)
            found.append((ask, step))
        return found
