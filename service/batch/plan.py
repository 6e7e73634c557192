"""The order in which a batch's prompts are run: depth-first through the tree of their prefixes.

Knows token bytes, places in a file and disk space; nothing of models, JSON or caches.

Sorted by their token bytes, prompts come in the depth-first order of their prefix tree, and what
one shares with any before it, it shares with its neighbour. So a list that is sorted on disk, in
runs that fit into memory, and merged while it is read, is all the tree that is needed:

    prompts        shared    computed        The optimum is the sum of the tree's edges, and one
    A B c d             0        4           token for each prompt that was there before as a whole:
    A B e               2        1           its last token is computed again, to say what follows.
    A B e               3        1 (last)
    A f                 1        1

Siblings that are leaves may change places without changing any of that: those that will say most
go first, so that the longest answers do not begin last.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from radixkv.tokens import TOKEN_BYTES, common_prefix

DEFAULT_MEMORY_BYTES = 256 * 2**20
MAX_SIBLINGS = 4096
"""Leaves that are put in order together; more are taken in pieces."""
_OVERHEAD_BYTES = 250
_HEAD = struct.Struct("<IIQIIQI?")


class Prompt(NamedTuple):
    """One prompt of one line, as it is sorted."""

    group: bytes
    """What must be equal to share anything: the adapter and the salt."""
    tokens: bytes
    """Big-endian uint32, as the cache has them."""
    line: int
    offset: int
    place: int
    """Which of the line's prompts."""
    answer_tokens: int
    """What it may generate, all choices together, at most; for the order alone."""
    choices: int
    reads_cache: bool
    """False: all of it is computed, whatever is cached, since scores of every token are wanted."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Step:
    """A prompt in its turn."""

    prompt: Prompt
    shared_tokens: int
    """Its longest common prefix with all prompts before it."""

    @property
    def cost(self) -> int:
        """Tokens of it that must be computed if nothing is computed twice."""
        prompt = self.prompt
        if not prompt.reads_cache:
            return prompt.num_tokens
        return max(1, prompt.num_tokens - self.shared_tokens)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a plan adds up to. Tokens of prompts."""

    num_prompts: int = 0
    prompt_tokens: int = 0
    unique_tokens: int = 0
    """The sum of the edges of the prefix tree."""
    optimum_tokens: int = 0
    """``unique_tokens``, one for each repeated prompt, and all of those that read no cache."""
    longest_tokens: int = 0
    """The longest path from the root to a leaf."""


class Plan:
    """The prompts of a batch: ``add`` all of them, then iterate, as often as you like.

    Holds at most about ``memory_bytes``; what is more lies in ``directory`` (default: the system's
    own for temporary files) until ``close``.
    """

    def __init__(
        self, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, directory: Path | None = None
    ) -> None:
        self._memory_bytes = memory_bytes
        self._directory = directory
        self._held: list[Prompt] = []
        self._held_bytes = 0
        self._runs: list[Path] = []
        self._spills: tempfile.TemporaryDirectory[str] | None = None
        self._sorted = True

    @property
    def num_runs(self) -> int:
        """Sorted runs that lie on disk."""
        return len(self._runs)

    def add(self, prompt: Prompt) -> None:
        """Take one more prompt in, in any order."""
        self._held.append(prompt)
        self._sorted = False
        self._held_bytes += len(prompt.tokens) + len(prompt.group) + _OVERHEAD_BYTES
        if self._held_bytes >= self._memory_bytes:
            self._spill()

    def totals(self) -> Totals:
        """Add up, in one pass over the prompts in their order."""
        found = Totals()
        for step in self:
            length = step.prompt.num_tokens
            found = replace(
                found,
                num_prompts=found.num_prompts + 1,
                prompt_tokens=found.prompt_tokens + length,
                unique_tokens=found.unique_tokens + length - step.shared_tokens,
                optimum_tokens=found.optimum_tokens + step.cost,
                longest_tokens=max(found.longest_tokens, length),
            )
        return found

    def __iter__(self) -> Iterator[Step]:
        return talkative_first(self._steps())

    def close(self) -> None:
        """Delete what lies on disk."""
        if self._spills is not None:
            self._spills.cleanup()
            self._spills = None
        self._runs.clear()
        self._held.clear()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _steps(self) -> Iterator[Step]:
        if not self._sorted:
            self._held.sort()
            self._sorted = True
        runs: list[Iterable[Prompt]] = [_read_run(path) for path in self._runs]
        return _with_shared(heapq.merge(*runs, self._held) if runs else iter(self._held))

    def _spill(self) -> None:
        """Write what is held to disk as one sorted run."""
        if self._spills is None:
            self._spills = tempfile.TemporaryDirectory(prefix="radixkv-batch-", dir=self._directory)
        self._held.sort()
        path = Path(self._spills.name) / f"{len(self._runs):05d}.run"
        with path.open("wb") as file:
            for prompt in self._held:
                _write(file, prompt)
        self._runs.append(path)
        self._held, self._held_bytes = [], 0


def talkative_first(steps: Iterable[Step]) -> Iterator[Step]:
    """Put sibling leaves in order of how much they may say, most first; subtrees stay in order.

    Leaves of one node are neighbours that share equally much with each other, and no more with
    what comes before or after.
    """
    family: list[Step] = []
    for step in steps:
        shared = step.shared_tokens
        if len(family) == 1 and shared < family[0].shared_tokens:
            yield from _by_answer(family)
            family = []
        elif len(family) > 1 and shared != family[1].shared_tokens:
            # The last one is a leaf of this node only if what follows does not share more with it.
            last = family.pop() if shared > family[1].shared_tokens else None
            yield from _by_answer(family)
            family = [] if last is None else [last]
        elif len(family) >= MAX_SIBLINGS:
            last = family.pop()
            yield from _by_answer(family)
            family = [last]
        family.append(step)
    yield from _by_answer(family)


def _by_answer(family: list[Step]) -> list[Step]:
    """Order leaves; whichever is the first now shares with what came before as the first did."""
    if len(family) < 2:
        return family
    before, among = family[0].shared_tokens, family[1].shared_tokens
    # A prompt that the others begin with is no leaf: behind them it would cost a token.
    at = int(family[0].prompt.num_tokens == among)
    ordered = family[:at] + sorted(
        family[at:], key=lambda step: (step.prompt.reads_cache, -step.prompt.answer_tokens)
    )
    return [Step(step.prompt, among if i else before) for i, step in enumerate(ordered)]


def _with_shared(prompts: Iterable[Prompt]) -> Iterator[Step]:
    before: Prompt | None = None
    for prompt in prompts:
        shared = 0
        if before is not None and before.group == prompt.group:
            shared = common_prefix(before.tokens, prompt.tokens)
        yield Step(prompt, shared)
        before = prompt


def _write(file: BinaryIO, prompt: Prompt) -> None:
    file.write(
        _HEAD.pack(
            len(prompt.group),
            len(prompt.tokens),
            prompt.offset,
            prompt.line,
            prompt.place,
            prompt.answer_tokens,
            prompt.choices,
            prompt.reads_cache,
        )
    )
    file.write(prompt.group)
    file.write(prompt.tokens)


def _read_run(path: Path) -> Iterator[Prompt]:
    with path.open("rb") as file:
        while head := file.read(_HEAD.size):
            group, tokens, offset, line, place, answer, choices, reads = _HEAD.unpack(head)
            yield Prompt(
                file.read(group), file.read(tokens), line, offset, place, answer, choices, reads
            )
