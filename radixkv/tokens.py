"""Token ids as bytes: how ids become keys, and how much two keys share.

Knows one encoding, four big-endian bytes a token, and nothing of blocks, trees or vocabularies.
Big-endian, because then the order of the bytes is the order of the ids, so the sibling that shares
most with a key is its neighbour in a sorted list, and a stretch of any length compares in one
memcmp.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

TokenBytes: TypeAlias = bytes
"""The ids of a sequence, big-endian uint32 each."""

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1

_SWAP = sys.byteorder == "little"
# A range smaller than this is looked at as one number rather than halved any further.
_SMALL = 256


def encode(ids: Iterable[int] | Any) -> TokenBytes:
    """Return ``ids`` as token bytes, without a Python step per token.

    Takes a sequence of ints, anything numpy can view as whole numbers (arrays, tensors, buffers of
    an integer format), or token bytes as ``bytes``, ``bytearray`` or a byte ``memoryview``, which
    are passed through. Raises ValueError for an id outside [0, 2**32) or a broken length, and
    TypeError for what is not a whole number.
    """
    if isinstance(ids, (bytes, bytearray)) or (isinstance(ids, memoryview) and ids.itemsize == 1):
        if len(ids) % TOKEN_BYTES:
            raise ValueError(f"token bytes have length {len(ids)}; wanted a multiple of 4")
        return bytes(ids)
    if isinstance(ids, (list, tuple, range)):
        try:
            words = array("I", ids)
        except OverflowError as e:
            raise ValueError(f"token ids must lie in [0, 2**32): {e}") from None
        if _SWAP:
            words.byteswap()
        return words.tobytes()
    if not isinstance(ids, (memoryview, array)) and not hasattr(ids, "__array__"):
        return encode(list(ids))
    numbers = np.asarray(ids).reshape(-1)
    if numbers.size == 0:
        return b""
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"token ids have dtype {numbers.dtype}; wanted whole numbers")
    if int(numbers.min()) < 0 or int(numbers.max()) > MAX_TOKEN_ID:
        raise ValueError(
            f"token ids must lie in [0, 2**32); got {int(numbers.min())} to {int(numbers.max())}"
        )
    return numbers.astype(">u4").tobytes()


def decode(tokens: TokenBytes) -> list[int]:
    """Return the ids of ``tokens``."""
    words = array("I", tokens)
    if _SWAP:
        words.byteswap()
    return words.tolist()


def count(tokens: TokenBytes) -> int:
    """Return how many tokens ``tokens`` holds."""
    return len(tokens) // TOKEN_BYTES


def common_prefix(a: TokenBytes, b: TokenBytes, start: int = 0) -> int:
    """Return how many tokens ``a`` from token ``start`` on shares with the beginning of ``b``."""
    begin = min(start * TOKEN_BYTES, len(a))
    return common_bytes(a, begin, len(a), b) // TOKEN_BYTES


def common_bytes(a: bytes, start: int, end: int, b: bytes) -> int:
    """Return how many bytes ``a[start:end]`` shares with the beginning of ``b``. O(log) memcmps.

    Halves the range while it is long (each step one memcmp of what is still unknown), then finds
    the first differing bit of the rest as that of one number.
    """
    low, high = 0, min(end - start, len(b))  # b[:low] is shared; what follows high is of no concern
    while high - low > _SMALL:
        middle = (low + high) // 2
        if a.startswith(b[low:middle], start + low):
            low = middle
        else:
            high = middle
    difference = int.from_bytes(a[start + low : start + high]) ^ int.from_bytes(b[low:high])
    return high - (difference.bit_length() + 7) // 8
