"""The rows of tokens that a handle is opened with, and whether a model's call agrees with them.

Knows ids, padding, positions and masks; nothing of KV. Comparisons stay on the device: whoever
asks decides when to wait for the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.errors import InvalidRequest

Ids = npt.NDArray[np.int64]


def rows_of(ids: Any, mask: Any = None) -> tuple[Ids, Ids]:
    """Return ids as [rows, tokens], and how many of each row's first are padding.

    Raises InvalidRequest for any padding but on the left, and for no tokens at all.
    """
    rows = np.atleast_2d(_array(ids))
    if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "iu":
        raise InvalidRequest(
            f"input_ids is {rows.dtype} {rows.shape}; wanted whole numbers, [rows, tokens]"
        )
    rows = rows.astype(np.int64)
    if mask is None:
        return rows, np.zeros(len(rows), np.int64)
    seen = np.atleast_2d(_array(mask)) != 0
    if seen.shape != rows.shape:
        raise InvalidRequest(f"attention_mask is {seen.shape}; wanted {rows.shape}")
    if (seen[:, 1:] < seen[:, :-1]).any() or not seen[:, -1].all():
        raise InvalidRequest(
            "attention_mask pads on the right or in the middle; wanted padding on the left alone, "
            "since each row's next token must follow its last"
        )
    return rows, seen.argmax(1).astype(np.int64)


def _array(ids: Any) -> npt.NDArray[Any]:
    return np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids)


class Declared:
    """Rows on a device; column ``c`` of a row has position ``c - pads[row]``, padding none."""

    def __init__(self, rows: Ids, pads: Ids, device: torch.device) -> None:
        self.ids = torch.from_numpy(rows).to(device)
        self.pads = torch.from_numpy(pads).to(device)
        self.num_pads: list[int] = pads.tolist()
        """``pads`` on the host, and of the rows before any was repeated."""
        self.padded = bool(pads.any())

    @property
    def num_columns(self) -> int:
        """Tokens of each row, padding included."""
        return self.ids.shape[1]

    def repeat(self, times: int) -> None:
        """Stand ``times`` rows for each one."""
        self.ids = self.ids.repeat_interleave(times, 0)
        self.pads = self.pads.repeat_interleave(times)

    def tokens_in(self, first: int, last: int) -> int:
        """Return how many tokens lie in columns ``[first, last)`` of the rows, none repeated."""
        return sum(max(0, last - max(first, pad)) for pad in self.num_pads)

    def positions(self, first: int, last: int) -> torch.Tensor:
        """Return the positions of columns, [1 or rows, columns]; those of padding are below 0."""
        columns = torch.arange(first, last, device=self.ids.device)[None]
        return columns - self.pads[:, None] if self.padded else columns

    def is_whole(self, ids: torch.Tensor, positions: torch.Tensor | None, begin: int) -> bool:
        """Tell whether ``ids`` begin with all the rows, not with what follows column ``begin``.

        Where both could be, positions decide, or else the length. Waits for the device.
        """
        rows, columns = self.ids.shape
        if len(ids) != rows or ids.shape[1] < columns:
            return False
        if not bool((ids[:, :columns] == self.ids.to(ids.device)).all()):
            return False
        if positions is not None:
            ends = (ids.shape[1] - 1 - self.pads).to(positions.device)
            return bool((positions[:, -1] == ends).all())
        suffix = self.same_ids(ids, begin)
        return ids.shape[1] == columns or suffix is None or not bool(suffix)

    def same_ids(self, ids: torch.Tensor, first: int) -> torch.Tensor | None:
        """Compare ids from column ``first`` on, as far as the rows go; None if not so far."""
        if first >= self.num_columns:
            return None
        declared = self.ids[:, first : first + ids.shape[1]].to(ids.device)
        right = ids[:, : declared.shape[1]] == declared
        if self.padded:
            positions = self.positions(first, first + declared.shape[1])
            right = right | (positions < 0).to(ids.device)
        return right.all()

    def same_positions(
        self, given: torch.Tensor | None, first: int, last: int
    ) -> torch.Tensor | None:
        """Compare position ids with those of columns ``[first, last)``."""
        if given is None:
            return None
        expected = self.positions(first, last).to(given.device)
        return ((given == expected) | (expected < 0)).all()

    def same_mask(self, mask: torch.Tensor | None, last: int) -> torch.Tensor | None:
        """Compare a mask of all columns before ``last`` with one that hides padding alone."""
        if mask is None:
            return None
        if mask.shape != (len(self.ids), last):
            raise InvalidRequest(
                f"attention_mask is {tuple(mask.shape)}; wanted a column for each token in the "
                f"cache and each new one: {(len(self.ids), last)}"
            )
        return ((mask != 0) == (self.positions(0, last) >= 0).to(mask.device)).all()
