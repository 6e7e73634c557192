"""One byte string for one value: the encoding that identities are compared and hashed by.

Knows plain values, mappings, sequences and dataclasses; nothing of what they mean.
Every value carries its type, every record its name and the names of its fields, ``None`` is
written out, mappings are sorted and every length is explicit, so two different values never share
an encoding and one value has the same encoding in every process and version of Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgpack


def encode(value: object) -> bytes:
    """Return the canonical encoding of ``value``; TypeError names a type that has none."""
    return _packed(_tagged(value))


def _tagged(value: object) -> list[Any]:
    """Return ``value`` as ``[tag, content]``: the tag keeps 1, 1.0, True and "1" apart."""
    if value is None:
        return ["null", None]
    if isinstance(value, bool):
        return ["bool", value]
    if isinstance(value, int):
        return ["int", str(value)]  # msgpack ends at 64 bits, configs need not
    if isinstance(value, float):
        return ["float", value]
    if isinstance(value, str):
        return ["str", value]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value)]
    if isinstance(value, Mapping):
        pairs = [(_tagged(k), _tagged(v)) for k, v in value.items()]
        return ["map", sorted(pairs, key=lambda pair: _packed(pair[0]))]
    if isinstance(value, (list, tuple)):
        return ["list", [_tagged(item) for item in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((_tagged(item) for item in value), key=_packed)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            (f.name, _tagged(getattr(value, f.name)))
            for f in dataclasses.fields(value)
            if f.compare
        ]
        return ["record", type(value).__name__, fields]
    raise TypeError(f"a {type(value).__name__} has no canonical encoding")


def _packed(tagged: list[Any]) -> bytes:
    """Return the bytes of an already tagged value."""
    packed: bytes = msgpack.packb(tagged, use_bin_type=True, unicode_errors="surrogatepass")
    return packed
