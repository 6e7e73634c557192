"""Digests of the things an identity is made of: weights, configs, tokenizers, templates, adapters.

Knows bytes, files and mappings; nothing of torch, transformers or where models come from.
Contents alone count: a renamed or moved file has the same fingerprint, a retrained one has not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from radixkv.identity import canonical

DIGEST_BYTES = 16

# Keys of a model's config that say where it lies or who saved it, not what it computes.
_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return 128 bits of blake2b of ``data`` in hexadecimal."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digest_text(text: str) -> str:
    """Return the digest of ``text``, to the character: a template's white space changes prompts."""
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


def digest_value(value: object) -> str:
    """Return the digest of a plain value, independent of the order of its mappings' keys."""
    return digest_bytes(canonical.encode(value))


def digest_config(config: Mapping[str, Any]) -> str:
    """Return the digest of a model's configuration, without the keys that name places."""
    return digest_value({k: v for k, v in config.items() if k not in _NOT_CONTENT})


def digest_json(text: str) -> str:
    """Return the digest of what a JSON document says, independent of its layout."""
    return digest_value(json.loads(text))


def digest_file(path: Path | str) -> str:
    """Return the digest of a file's contents. Reads all of it, about 1 GB/s."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, _blake2b).hexdigest()


def digest_files(paths: Iterable[Path | str]) -> str:
    """Return one digest for a set of files; neither their names nor their order matter."""
    return combine(*sorted(digest_file(path) for path in paths))


def combine(*parts: str | None) -> str:
    """Return one digest of several, in this order; None is a part of its own kind."""
    return digest_value(list(parts))


def model_digest(architecture: str, config: str, weights: str, revision: str | None = None) -> str:
    """Return the ``model`` field of an identity from its architecture's name and three digests."""
    return digest_value(
        {"architecture": architecture, "config": config, "weights": weights, "revision": revision}
    )


def adapter_digest(weights: str, scale: float) -> str:
    """Return the ``adapter`` field: the adapter's weights and its scale, never its name."""
    return digest_value({"weights": weights, "scale": float(scale)})


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
