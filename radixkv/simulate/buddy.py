"""A buddy allocator over slots: what engines without paging cut their KV memory up with.

Knows sizes and addresses; nothing of who asks. Sizes are rounded up to powers of two, free blocks
are split in halves and joined with their buddies again (Knowlton, 1965).
"""

from __future__ import annotations


class BuddyAllocator:
    """Hands out stretches of ``capacity`` slots; a capacity that is no power of two is a row of
    ever smaller ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = 0
        """Slots handed out, rounding included."""
        self._free: dict[int, set[int]] = {}
        self._roots: list[tuple[int, int]] = []  # address, size
        at = 0
        while at < capacity:
            size = 1 << (capacity - at).bit_length() - 1
            self._roots.append((at, size))
            self._free.setdefault(size, set()).add(at)
            at += size

    def take(self, num_slots: int) -> int | None:
        """Return the address of at least ``num_slots`` slots, None if there is no such stretch."""
        size = _rounded(num_slots)
        found = min((s for s, free in self._free.items() if s >= size and free), default=None)
        if found is None:
            return None
        address = min(self._free[found])
        self._free[found].remove(address)
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(address + found)
        self.allocated += size
        return address

    def give_back(self, address: int, num_slots: int) -> None:
        """Take back what ``take(num_slots)`` handed out at ``address``."""
        size = _rounded(num_slots)
        self.allocated -= size
        root, whole = next((a, s) for a, s in reversed(self._roots) if a <= address)
        while size < whole:
            buddy = root + ((address - root) ^ size)
            free = self._free.setdefault(size, set())
            if buddy not in free:
                break
            free.remove(buddy)
            address = min(address, buddy)
            size *= 2
        self._free.setdefault(size, set()).add(address)


def _rounded(num_slots: int) -> int:
    return 1 << (num_slots - 1).bit_length()
