"""Stands in for a device that records graphs: replays by running again, and proves that it could.

A replayed graph launches what was recorded, whatever the host has decided since, over the memory
that it was recorded with. So each time again must launch the very same: the same operators with the
same numbers, shapes and strides, on the same memory where it is not the run's own. What a step was
copied from is poisoned before, so that nothing can be read but the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = -(1 << 30)
_ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "item")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator with all that a recorded launch would keep of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Any] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in _ASKS_THE_HOST), f"{name} waits for the device"
        given = tree_leaves((args, kwargs or {}))
        self.notes.append((name, [self._note(x) for x in given]))
        result = func(*args, **(kwargs or {}))
        outside = {_memory(x) for x in given if isinstance(x, torch.Tensor)} - self._own
        made = {_memory(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        self._own |= made - outside
        return result

    def _note(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        place = "own" if _memory(x) in self._own else x.data_ptr()
        return place, tuple(x.shape), x.stride(), x.dtype


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class ReplayedEagerly:
    """A GraphDevice for a CPU."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run it once to warm up, then note what it launches; each replay must launch the same."""
        self.num_recorded += 1
        run()
        with Launches() as recorded:
            result = run().clone()
        result.fill_(torch.nan)

        def replay() -> None:
            with Launches() as again:
                answer = run()
            assert again.notes == recorded.notes[: len(again.notes)]
            assert len(again.notes) == len(recorded.notes) - 1  # the clone above
            result.copy_(answer)

        return result, replay

    def sent(self, *sources: np.ndarray[Any, Any]) -> None:
        """Poison what the buffers were filled from."""
        for array in sources:
            array.fill(POISON)
