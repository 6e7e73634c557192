"""What an engine is built of: its settings, and the model they ask for.

Knows configs, paths and loaded models; nothing of threads, pools or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from radixkv.config import EngineConfig, parse_bytes
from radixkv.errors import InvalidConfig
from radixkv.service.engine.loading import LoadedModel, load_model, resolve_model
from radixkv.service.engine.preflight import check_settings


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
    if not isinstance(model, LoadedModel):
        path = path or resolve_model(config.model, progress=progress)
        check_settings(path, config)
        if progress is not None:
            progress(f"loading {config.model}")
        model = load_model(
            path,
            name=config.model,
            dtype=config.dtype,
            device=config.device,
            decoder=config.decoder,
        )
    _expect_decoder(model, config)
    return model


def _expect_decoder(loaded: LoadedModel, config: EngineConfig) -> None:
    """Refuse a model that was loaded for another decoder than ``config`` asks for."""
    if loaded.decoder is not None:
        if config.decoder == "generic":
            raise InvalidConfig(
                f"decoder is 'generic', but {loaded.name} was loaded for the compiled decoder; "
                "load it with decoder='generic'"
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
