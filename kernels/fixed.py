"""A decode step in memory that stays where it is: all that a captured graph may read of a step.

Knows rows of one token each, what fills the rows that nobody has, and one transfer a step; nothing
of graphs, models, or of what the lists of a backend mean.

    rows         0 .. n - 1            n .. rows - 1
    token ids    of the sequences      0
    kv_lens      of the sequences      1
    tables       of the sequences      the scratch block, which belongs to no sequence

A row that nobody has is a whole sequence of one token: it writes and reads the first slot of the
scratch block, so every backend may compute it, and nobody reads what comes of it.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.plan import AttentionPlan, Int32, Int64

T = TypeVar("T")
Shapes = Mapping[Hashable, tuple[int, ...]]

_ALIGNED = 4  # numbers of 32 bits: kernels are compiled once more for less
_WIDE = ("token_ids", "positions", "slots")  # int64


@dataclass(frozen=True, slots=True, eq=False)
class FixedPlan(AttentionPlan):
    """The plan of sequences of one token each, whose tensors are overwritten from step to step.

    What a backend derives from its values is stale at the next step, so none of it is kept. A
    backend that launches kernels finds its lists in ``work``, overwritten like all else; only one
    that runs on the host may read the arrays of the host, which are the same memory then.
    """

    work: Mapping[Hashable, torch.Tensor] = field(default_factory=dict)
    listed_for: Any = None  # what the backend made the lists for, in its own terms
    slots_of_partials: int = 0  # how many partial results the lists name, at most

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Make it anew: the plan has changed."""
        return make()


class Arena:
    """Named arrays of whole numbers in one piece of the host's memory, and again on a device."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        sizes = {
            name: int(np.prod(shape)) * (2 if name in _WIDE else 1)
            for name, shape in shapes.items()
        }
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size // _ALIGNED) * _ALIGNED
        self.staging: Int32 = np.zeros(end, dtype=np.int32)
        self._there = torch.zeros(end, dtype=torch.int32, device=device)
        self.host: dict[Hashable, npt.NDArray[Any]] = {}
        self.device: dict[Hashable, torch.Tensor] = {}
        for name, shape in shapes.items():
            here = self.staging[starts[name] : starts[name] + sizes[name]]
            there = self._there[starts[name] : starts[name] + sizes[name]]
            if name in _WIDE:
                here, there = here.view(np.int64), there.view(torch.int64)
            self.host[name] = here.reshape(shape)
            self.device[name] = there.view(shape)

    def send(self) -> None:
        """Copy all arrays to the device, in one transfer; the host's may change afterwards."""
        self._there.copy_(torch.from_numpy(self.staging))


class FixedStep:
    """The buffers of steps of up to ``rows`` sequences, and the plan over them.

    tables   int32 [at least rows, width] on the device; several may share it, one after the other
    lists    shapes of a backend's lists, int32, by the names under which the plan has them
    """

    def __init__(
        self,
        rows: int,
        tables: torch.Tensor,
        block_size: int,
        *,
        lists: Shapes | None = None,
        listed_for: Any = None,
        slots_of_partials: int = 0,
        on_host: bool = False,
    ) -> None:
        device = tables.device
        expect(not on_host or device.type == "cpu", "tables", "on the CPU", tables)
        one: tuple[int, ...] = (rows,)
        shapes: dict[Hashable, tuple[int, ...]] = dict.fromkeys((*_WIDE, "kv_lens"), one)
        self.arena = Arena(shapes | dict(lists or {}), device)
        self._tables = tables[:rows]
        there = self.arena.device
        self.token_ids = there["token_ids"]
        ends = np.arange(rows + 1, dtype=np.int32)
        none = np.empty(0, dtype=np.int32)
        self.plan = FixedPlan(
            block_size=block_size,
            num_seqs=rows,
            num_tokens=rows,
            max_query_len=1,
            max_kv_len=tables.shape[1] * block_size,
            cu_seqlens_q=torch.from_numpy(ends).to(device),
            kv_lens=there["kv_lens"],
            block_tables=self._tables,
            slots=there["slots"],
            positions=there["positions"],
            host_query_lens=np.ones(rows, dtype=np.int32),
            host_kv_lens=there["kv_lens"].numpy() if on_host else none,
            host_block_tables=self._tables.numpy() if on_host else none,
            host_cu_seqlens_q=ends,
            decode_seqs=np.arange(rows),
            prefill_seqs=np.arange(0),
            work={name: there[name] for name in lists or {}},
            listed_for=listed_for,
            slots_of_partials=slots_of_partials,
        )

    def load(
        self, token_ids: Int64, padded: AttentionPlan, lists: Mapping[Hashable, Int32] | None = None
    ) -> None:
        """Overwrite the buffers with a step: the padded plan of as many rows, and its lists.

        token_ids  [n] of the first n rows
        lists      of the shapes that this was built with
        """
        here = self.arena.host
        here["token_ids"][: len(token_ids)] = token_ids
        here["token_ids"][len(token_ids) :] = 0
        here["positions"][:] = padded.positions.numpy()
        here["slots"][:] = padded.slots.numpy()
        here["kv_lens"][:] = padded.host_kv_lens
        for name, lines in (lists or {}).items():
            here[name][:] = lines
        self.arena.send()
        # Only as wide as some row is long: what lies behind is never read.
        width = padded.host_block_tables.shape[1]
        self._tables[:, :width].copy_(torch.from_numpy(padded.host_block_tables))


def padded_plan(
    kv_lens: Int32, block_tables: Int32, rows: int, scratch_block: int, block_size: int
) -> AttentionPlan:
    """Plan a step of one token a sequence on the host, with rows that nobody has at its end."""
    n = len(kv_lens)
    lens = np.ones(rows, dtype=np.int32)
    lens[:n] = kv_lens
    width = max(1, -(-int(lens.max()) // block_size))
    tables = np.full((rows, width), scratch_block, dtype=np.int32)
    tables[:n] = block_tables[:, :width]
    return AttentionPlan.build(np.ones(rows, dtype=np.int32), lens, tables, block_size)
