"""What an engine is built of: its settings, and the model they ask for.

Knows configs, paths and loaded models; nothing of threads or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from radixkv.config import EngineConfig, parse_bytes
from radixkv.errors import InvalidConfig
from radixkv.service.engine.cuda_graphs import cuda_graphs
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from radixkv.service.engine.preflight import check_settings
from radixkv.service.engine.runner import ModelRunner
from radixkv.service.engine.templates import read_template, with_template


def settings_of(
    model: str | LoadedModel | None, config: EngineConfig | None, settings: dict[str, Any]
) -> EngineConfig:
    """Lay ``settings`` over ``config``, and the model's name; InvalidConfig names what is wrong."""
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise InvalidConfig(f"{name} is no setting; known: {', '.join(known)}")
    for name in ("kv_memory", "swap_memory"):
        if name in settings:
            settings[name] = parse_bytes(settings[name], name)
    if model is not None:
        settings["model"] = model.name if isinstance(model, LoadedModel) else model
    return replace(config or EngineConfig(), **settings)


def model_of(
    model: str | LoadedModel | None,
    config: EngineConfig,
    path: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Return the model that ``config`` asks for: the one given, or loaded from where it lies."""
    template = None if config.chat_template is None else read_template(config.chat_template)
    if not isinstance(model, LoadedModel):
        path = path or resolve_model(config.model, progress=progress)
        check_settings(path, config)
        if progress is not None:
            progress(f"loading {config.model}")
        small = config.kv_dtype != "auto" and config.decoder == "auto"
        model = load_model(
            path,
            name=config.model,
            dtype=config.dtype,
            device=config.device,
            decoder="generic" if small else config.decoder,  # the compiled one stores no codes
        )
        if small:
            model.generic_reason = f"kv_dtype is {config.kv_dtype}"
    _expect_decoder(model, config)
    if template is not None:
        model = with_template(model, template, str(config.chat_template))
    return model


def kv_dtype_of(config: EngineConfig) -> torch.dtype | None:
    """Return what the pool stores, None: what the model computes."""
    return {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[config.kv_dtype]


def runner_of(loaded: LoadedModel, config: EngineConfig, num_blocks: int) -> ModelRunner:
    """Make what computes the steps, with a pool of ``num_blocks``."""
    graphs = cuda_graphs(loaded.device, config.cuda_graphs)
    return ModelRunner(
        loaded,
        num_blocks,
        config.block_size,
        kv_dtype=kv_dtype_of(config),
        graphs=graphs,
        max_num_seqs=config.max_num_seqs,
    )


def _expect_decoder(loaded: LoadedModel, config: EngineConfig) -> None:
    """Refuse a model that was loaded for another decoder than ``config`` asks for."""
    if loaded.decoder is not None:
        if config.decoder == "generic":
            raise InvalidConfig(
                f"decoder is 'generic', but {loaded.name} was loaded for the compiled decoder; "
                "load it with decoder='generic'"
            )
        if config.kv_dtype != "auto":
            raise InvalidConfig(
                f"kv_dtype is {config.kv_dtype!r}, but {loaded.name} was loaded for the compiled "
                "decoder, which stores what it computes; load it with decoder='generic'"
            )
        return
    for wanted, what in (
        (config.deterministic, "deterministic is on, which"),
        (config.decoder == "native", "decoder is 'native', which"),
    ):
        if wanted:
            raise InvalidConfig(
                f"{what} needs the compiled decoder, and it cannot run {loaded.name}: "
                f"{loaded.generic_reason}"
            )


def step_tokens_of(model: LoadedModel, config: EngineConfig) -> int:
    """Return the most tokens of a step: fewer on a CPU, where larger steps save next to nothing of
    a prefill, and those of 512 take about a second even of the small model."""
    if config.max_batch_tokens is not None:
        return config.max_batch_tokens
    return 256 if model.device.type == "cpu" else 512
