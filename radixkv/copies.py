"""Copies that the device has yet to make, by their source.

Knows block ids and how many tokens each copy reads; nothing of whose they are.
"""

from __future__ import annotations


class PendingCopies:
    """Counts the copies of each block that have been promised and not been made.

    Only of blocks that tables share: nobody writes to those of the tree.
    """

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[
            int, tuple[int, int]
        ] = {}  # block -> (copies, most tokens any of them reads)

    def __contains__(self, block: int) -> bool:
        """Tell whether a copy of ``block`` is yet to be made."""
        return block in self._of

    def note(self, block: int, num_valid: int) -> None:
        """Add a copy of the first ``num_valid`` tokens of ``block``."""
        copies, most = self._of.get(block, (0, 0))
        self._of[block] = (copies + 1, max(most, num_valid))

    def forget(self, block: int) -> None:
        """Take back one copy of ``block``: it was made, or nobody waits for it any more."""
        copies, most = self._of.pop(block)
        if copies > 1:
            self._of[block] = (copies - 1, most)

    def harmless(self, block: int, first: int) -> int:
        """Return how many copies writing ``block`` from token ``first`` on would not harm."""
        copies, most = self._of.get(block, (0, 0))
        return copies if most <= first else 0
