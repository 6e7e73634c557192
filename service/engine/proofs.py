"""Remembers which models were proven exact here, so that starting again need not prove it.

A proof stands for the weights, the configuration, the tokenizer and the execution settings of a
model, for this version of our own code and of the libraries below it, and for the device: if any of
them is another one, it is made anew. Only what was proven is remembered, never a refusal. Knows
digests and empty files, one for each proof, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
import transformers

import radixkv
from radixkv.kernels.native import cache_folder, processor, unavailable_reason

if TYPE_CHECKING:
    from radixkv.service.engine.loading import LoadedModel

_CODE = ("kernels", "service/engine")


def is_proven(loaded: LoadedModel) -> bool:
    """Whether this model was proven exact before, by this code on this kind of device."""
    return os.path.exists(_place(loaded))  # False, too, where the folder must not be read


def note_proven(loaded: LoadedModel) -> None:
    """Remember the proof; where the folder cannot be written it is made again next time."""
    with contextlib.suppress(OSError):
        place = _place(loaded)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _place(loaded: LoadedModel) -> Path:
    parts = (
        repr(loaded.fingerprints),
        str(loaded.generic_reason),
        *_device(loaded.device),
        radixkv.__version__,
        numpy.__version__,
        torch.__version__,
        transformers.__version__,
        _digest_code(),
    )
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cache_folder() / "proven" / name


def _device(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return ["cuda", torch.cuda.get_device_name(device)]
    return [device.type, *processor(), str(unavailable_reason())]


@functools.cache
def _digest_code() -> str:
    """Digest of what computes a step: those who change it want their proof again."""
    digest = hashlib.sha256()
    root = Path(radixkv.__file__).parent
    for folder in _CODE:
        for path in sorted(root.joinpath(folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                name = os.fspath(path.relative_to(root)).encode()
                data = path.read_bytes()
                digest.update(b"%d %d " % (len(name), len(data)) + name + data)
    return digest.hexdigest()
