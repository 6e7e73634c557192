"""Reads an adapter from a directory as PEFT saves it, or says by name what in it is not understood.

Knows adapter_config.json and the names of tensors; nothing of models. Only safetensors are read,
whole and once: a file that is overwritten later changes nothing that was loaded.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixkv.errors import InvalidAdapter, NotFound
from radixkv.identity.fingerprint import adapter_digest, combine, digest_value
from radixkv.service.engine.fingerprints import digest_weights

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MAX_RANK = 4096
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_TEXTS = (str, list)
_TYPES: dict[str, tuple[type, ...]] = {
    "target_modules": _TEXTS, "exclude_modules": _TEXTS, "layers_pattern": _TEXTS,
    "layers_to_transform": (int, list), "rank_pattern": (dict,), "alpha_pattern": (dict,),
}  # fmt: skip
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to draw the first weights that leave the base model as it was; others change it."""
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "bias", "task_type",
}  # fmt: skip
_OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "peft_version", "megatron_core", "runtime_config", "eva_config", "qalora_group_size",
    "loftq_config", "lora_ga_config", "corda_config", "ensure_weight_tying",
}  # fmt: skip
"""What changes no answer: where the model came from, and how the adapter was trained."""
_REASONS = {
    "use_dora": "DoRA scales whole columns, which low-rank products alone cannot",
    "modules_to_save": "it replaces whole modules of the model; merge it into a model instead",
    "lora_bias": "biases of the low-rank products are not applied",
    "fan_in_fan_out": "the weights are stored transposed",
    "trainable_token_indices": "it changes embeddings of tokens",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes parameters that are no linear layers",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
}


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one linear layer: ``scale * (x @ a.T @ b.T)``."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class PeftAdapter:
    """An adapter as it lies in its directory."""

    layers: Mapping[str, LowRank]
    """By the path of the linear layer in the model."""
    digest: str
    """Of all weights and scales; of no name and no place."""
    targets: Callable[[str], bool]
    """Whether the config means the linear layer of this path."""

    @property
    def max_rank(self) -> int:
        """The greatest rank of its products."""
        return max(len(layer.a) for layer in self.layers.values())


def read_peft(folder: Path | str, *, scale: float = 1.0) -> PeftAdapter:
    """Read the adapter in ``folder``; ``scale`` multiplies its own.

    Raises NotFound, or InvalidAdapter with the reason. Runs and unpickles nothing.
    """
    folder = Path(folder)
    if not math.isfinite(scale):
        raise InvalidAdapter(f"scale is {scale}; wanted a finite number")
    if not folder.is_dir():
        raise NotFound(f"there is no adapter in {str(folder)!r}: no such directory")
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _KEY.fullmatch(name)
        if found is None:
            raise InvalidAdapter(
                f"{folder / WEIGHTS} holds {name!r}, which is no low-rank weight of a linear layer"
            )
        pairs.setdefault(found["path"], {})[found["factor"]] = tensor
    layers = {path: _layer(path, pair, config, scale) for path, pair in sorted(pairs.items())}
    if not layers:
        raise InvalidAdapter(f"{folder / WEIGHTS} holds no weights")
    scales = {path: layer.scale for path, layer in layers.items()}
    weights = digest_weights({f"{p}.{f}": t for p, pair in pairs.items() for f, t in pair.items()})
    return PeftAdapter(
        layers, adapter_digest(combine(weights, digest_value(scales)), scale), _targets(config)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(_read_file(path))
    except FileNotFoundError:
        raise NotFound(f"{str(folder)!r} is no adapter of PEFT: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidAdapter(f"{path} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise InvalidAdapter(f"{path} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise InvalidAdapter(f"{path}: peft_type is {config.get('peft_type')!r}; served: LORA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise InvalidAdapter(f"{path}: task_type is {config['task_type']!r}; served: CAUSAL_LM")
    if config.get("bias", "none") != "none":
        raise InvalidAdapter(f"{path}: bias is {config['bias']!r}: it replaces the model's biases")
    init = config.get("init_lora_weights")
    if not any(init is known or init == known for known in _HARMLESS_INITS):
        raise InvalidAdapter(
            f"{path}: init_lora_weights is {init!r}, which also changes the model that the adapter "
            "belongs to; convert it to a plain LoRA adapter first"
        )
    for key, types in _TYPES.items():
        value = config.get(key)
        inner = int if key == "layers_to_transform" else str
        fits = value is None or isinstance(value, types)
        if not fits or (isinstance(value, list) and not all(isinstance(v, inner) for v in value)):
            raise InvalidAdapter(f"{path}: {key} is {value!r}; it cannot be read")
    for key, value in config.items():
        if value and key not in _READ | _OF_TRAINING:
            reason = _REASONS.get(key, "it is not known here, so answers might be wrong")
            raise InvalidAdapter(f"{path} sets {key}: {reason}")
    return config


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    import safetensors
    import safetensors.torch

    path = folder / WEIGHTS
    try:
        return safetensors.torch.load(_read_file(path))
    except FileNotFoundError:
        pickled = sorted(p.name for p in folder.glob("adapter_model*.bin"))
        why = f"; {pickled[0]} is a pickle, which can run code, and is not read" if pickled else ""
        raise NotFound(f"{str(folder)!r} has no {WEIGHTS}{why}") from None
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as e:
        raise InvalidAdapter(f"{path} cannot be read: {e}") from e


def _read_file(path: Path) -> bytes:
    """Read a regular file; a pipe or device in its place, which could wait for good, is refused."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return path.read_bytes()


def _layer(
    path: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any], scale: float
) -> LowRank:
    if len(pair) != 2:
        raise InvalidAdapter(f"the adapter has only one of lora_A and lora_B of {path}")
    a, b = pair["A"], pair["B"]
    rank = _number(config, "rank_pattern", "r", 8, path)
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise InvalidAdapter(
            f"r is {rank!r} for {path}; wanted a whole number from 1 to {MAX_RANK}"
        )
    alpha = _number(config, "alpha_pattern", "lora_alpha", 8, path)
    if not abs(alpha) < 1e6:  # also refuses what is no number at all
        raise InvalidAdapter(f"lora_alpha is {alpha!r} for {path}; wanted at most a million")
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise InvalidAdapter(
            f"the weights of {path} are {tuple(a.shape)} and {tuple(b.shape)}; wanted rank {rank}, "
            "as the config says"
        )
    for tensor in (a, b):
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise InvalidAdapter(f"the weights of {path} are {tensor.dtype}")
        if not bool(tensor.isfinite().all()):
            raise InvalidAdapter(f"the weights of {path} hold numbers that are not finite")
    root = math.sqrt(rank) if config.get("use_rslora") else rank
    return LowRank(a, b, scale * alpha / root)


def _number(config: Mapping[str, Any], patterns: str, key: str, default: int, path: str) -> Any:
    """Return the number for one layer: the first pattern that ends its path, else the general."""
    named: Mapping[str, Any] = config.get(patterns) or {}
    found = (value for pattern, value in named.items() if _matches(rf"(.*\.)?({pattern})", path))
    value = next(found, config.get(key, default))
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidAdapter(f"{key} is {value!r} for {path}; wanted a number")
    return value


def _targets(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return PEFT's own rule for which layers a config means."""
    names, without = config.get("target_modules"), config.get("exclude_modules")
    wanted_layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    wanted = [wanted_layers] if isinstance(wanted_layers, int) else wanted_layers
    patterns = [patterns] if isinstance(patterns, str) else patterns

    def index_of(path: str) -> int | None:
        for pattern in patterns or []:
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path):
                return int(found[1])
        found = None if patterns else _LAYER.match(path)
        return None if found is None else int(found[1])

    def targets(path: str) -> bool:
        if without and _named(without, path):
            return False
        if names is None or names == "all-linear":
            return True
        if isinstance(names, str) or path in names or not wanted:
            return _named(names, path)
        return _named(names, path) and index_of(path) in wanted

    return targets


def _named(names: Any, path: str) -> bool:
    if isinstance(names, str):
        return _matches(names, path)
    return any(path == name or path.endswith(f".{name}") for name in names)


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error as e:
        raise InvalidAdapter(f"the adapter's config has the pattern {pattern!r}: {e}") from e
