"""How long blocks stay in the tree, how long of that unused, how soon they are found again.

Knows blocks, when nodes were used and a clock in seconds; of tokens only whether a block still has
the same. It samples: it looks at one in so many, and its memory is bounded.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from radixkv.blocks import BlockIds
from radixkv.nodes import UNUSED, Node
from radixkv.sketch import Marks, Sketch

BOUNDS_S = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the histograms' buckets, in seconds."""
QUANTILES = (0.5, 0.9, 0.99)
SERIES = ("lifetime", "idle", "reuse_gap")

_FINDS_BITS = 7  # one acquire in 64 is looked at, on average: at random, lest it miss a rhythm
_FEW = 16  # blocks that are quicker looked up one by one
_TRACKED = 1024  # blocks whose birth is known, at most
_CHILDREN = 8  # of a node, that are asked when it was used last


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations by length: ``counts[i]`` do not exceed ``bounds_s[i]``; ``count`` is all."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float
    count: int


class Residency:
    """Three distributions of seconds, since the cache was made or its counters were cleared.

        lifetime    from a block's publication to its eviction
        idle        from its last use to its eviction
        reuse_gap   from its last use until it is found again, 0 if it was in use yet; of the last
                    block of what was found. Where many paths share it, the newest of them tell.

    Of blocks that were evicted, or found; of none that are there still or went in a reset. What
    was never in use is left out, not 0. When something was let go is known by ``tick`` alone: what
    was between two of them counts as of the later one.
    """

    def __init__(
        self, num_blocks: int, stride: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._stride = stride
        self._marks = Marks()
        self.until_find = 1
        self._look_at_idle = False  # of what is evicted next
        self._random = random.Random(num_blocks)
        self._marks.note(1, clock())  # as the clock of a new tree
        self._num_births = 0
        # Block -> when it was published, with which tokens, as one of how many: it may have come to
        # hold others since.
        self._births: OrderedDict[int, tuple[float, bytes, int]] = OrderedDict()
        self._is_tracked = np.zeros(num_blocks, np.bool_)
        self.clear()

    def clear(self) -> None:
        """Let the distributions begin again from nothing."""
        self.lifetime, self.idle, self.reuse_gap = Sketch(), Sketch(), Sketch()

    def forget(self) -> None:
        """Note that all blocks have gone in a reset."""
        self._births.clear()
        self._is_tracked[:] = False

    # -- what happens ------------------------------------------------------------------------------

    def tick(self, count: int) -> None:
        """Note that the clock of the tree, which counts releases, stands at ``count`` now."""
        self._marks.note(count, self.clock())

    def published(self, key: bytes, blocks: BlockIds) -> None:
        """Remember when one of these blocks, that now enter the tree, was published.

        To be called once after each ``found``. It stands for all of them.
        """
        self._num_births += 1
        at = self._num_births % len(blocks)
        block = blocks[at]
        tokens = key[at * self._stride : (at + 1) * self._stride]
        self._births.pop(block, None)
        self._births[block] = (self.clock(), tokens, len(blocks))
        self._is_tracked[block] = True
        if len(self._births) > _TRACKED:
            oldest, _ = self._births.popitem(last=False)
            self._is_tracked[oldest] = False

    def evicting(self, leaf: Node, keep: int) -> None:
        """Look at what goes as ``leaf`` is to lose all its blocks but the first ``keep``.

        To be called at every eviction after the first ``found``: the birth of few blocks is known,
        and one that went unseen would tell nothing. Cheap where none of these goes.
        """
        if self._look_at_idle:
            self._look_at_idle = False
            idle = self.seconds_since(count_of(leaf.used))
            if idle is not None:
                self.idle.add(idle, len(leaf.blocks) - keep)
        blocks = leaf.blocks
        num_gone = len(blocks) - keep
        if num_gone == 1 and blocks[-1] not in self._births:
            return
        if keep:
            blocks = blocks[keep:]
        if num_gone <= _FEW:
            if self._births.keys().isdisjoint(blocks):
                return
        elif not self._is_tracked[np.frombuffer(blocks, np.int32)].any():
            return
        now = self.clock()
        for i, block in enumerate(blocks):
            if block in self._births:
                born, tokens, weight = self._births.pop(block)
                self._is_tracked[block] = False
                at = (keep + i) * self._stride
                if leaf.key[at : at + self._stride] == tokens:
                    self.lifetime.add(now - born, weight)

    def found(self, node: Node | None, depth: int) -> None:
        """Look at what an acquire has found: a path to ``depth``, on the edge of ``node``.

        To be called before it is held, when ``until_find``, which counts them down, is 0.
        """
        self._look_at_idle = True
        self.until_find = 1 + self._random.getrandbits(_FINDS_BITS)
        idle = None if node is None else self.idle_of(node, depth)
        if idle is not None:
            self.reuse_gap.add(idle)

    # -- what is known -----------------------------------------------------------------------------

    def idle_of(self, node: Node, depth: int) -> float | None:
        """Return the seconds since the block before ``depth`` was in use; None: unknown."""
        node = node.at(depth)
        if node.num_holding(depth) > 0:
            return 0.0
        used = node.used
        for end, when in node.steps or ():
            if end >= depth:
                used = when
        last = count_of(used)
        for key in islice(reversed(node.children or {}), _CHILDREN):
            last = max(last, count_of(last_use((node.children or {})[key])))
        return self.seconds_since(last)

    def seconds_since(self, count: int) -> float | None:
        """Return the seconds since the tree's clock stood at ``count``; None: unknown."""
        return self._marks.seconds_since(count, self.clock())

    def as_of_now(self) -> Callable[[int], float | None]:
        """Return what tells ``seconds_since`` as it is now, at any time and on any thread."""
        return partial(self._marks.copy().seconds_since, now=self.clock())

    def quantiles(self) -> dict[str, dict[float, float | None]]:
        """Return for each of SERIES its QUANTILES in seconds; None where nothing was sampled."""
        return {name: {q: getattr(self, name).quantile(q) for q in QUANTILES} for name in SERIES}

    def histogram(self, name: str) -> Histogram:
        """Return one of SERIES as counts by BOUNDS_S, each within 5 % of its bound."""
        if name not in SERIES:
            raise ValueError(f"there is no series {name!r}; accepted: {', '.join(SERIES)}")
        sketch: Sketch = getattr(self, name)
        return Histogram(BOUNDS_S, sketch.cumulative(BOUNDS_S), sketch.sum, sketch.count)


def count_of(used: int) -> int:
    """Return what the tree's clock showed at a time that a node notes; 0 if it was never used."""
    return used if used >= 0 else used - UNUSED


def last_use(node: Node) -> int:
    """Return when any of this edge was used last, as far as it knows by itself."""
    return node.steps[-1][1] if node.steps else node.used
