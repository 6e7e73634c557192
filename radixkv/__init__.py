"""radixkv: an exact, inspectable prefix cache for language models, and the service around it.

The cache alone (``PrefixCache``, ``BlockTable``, ``CacheIdentity``) needs numpy and nothing else;
names that need torch (``Engine``) are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.config import EngineConfig, ServerConfig
    from radixkv.errors import RadixKVError
    from radixkv.identity.identity import CacheIdentity, Namespace
    from radixkv.service.engine.beams import BeamParams
    from radixkv.service.engine.beams_asking import BeamResult
    from radixkv.service.engine.engine import Engine
    from radixkv.service.engine.grammar import GrammarSpec
    from radixkv.service.engine.loading import LoadedModel
    from radixkv.service.engine.params import Delta, Generation, SamplingParams
    from radixkv.service.hf_cache import TransformersPrefixCache
    from radixkv.service.session import Session
    from radixkv.service.session_hold import SessionLease
    from radixkv.service.session_reply import Reply, Turn
    from radixkv.stats import CacheStats
    from radixkv.table import BlockTable

__version__ = "0.1.0"

_HOME = {
    "BeamParams": "radixkv.service.engine.beams",
    "BeamResult": "radixkv.service.engine.beams_asking",
    "BlockTable": "radixkv.table",
    "CacheIdentity": "radixkv.identity.identity",
    "CacheStats": "radixkv.stats",
    "Delta": "radixkv.service.engine.params",
    "Engine": "radixkv.service.engine.engine",
    "EngineConfig": "radixkv.config",
    "Generation": "radixkv.service.engine.params",
    "GrammarSpec": "radixkv.service.engine.grammar",
    "LoadedModel": "radixkv.service.engine.loading",
    "Namespace": "radixkv.identity.identity",
    "PrefixCache": "radixkv.cache",
    "RadixKVError": "radixkv.errors",
    "Reply": "radixkv.service.session_reply",
    "SamplingParams": "radixkv.service.engine.params",
    "ServerConfig": "radixkv.config",
    "Session": "radixkv.service.session",
    "SessionLease": "radixkv.service.session_hold",
    "TransformersPrefixCache": "radixkv.service.hf_cache",
    "Turn": "radixkv.service.session_reply",
}

__all__ = [
    "BeamParams",
    "BeamResult",
    "BlockTable",
    "CacheIdentity",
    "CacheStats",
    "Delta",
    "Engine",
    "EngineConfig",
    "Generation",
    "GrammarSpec",
    "LoadedModel",
    "Namespace",
    "PrefixCache",
    "RadixKVError",
    "Reply",
    "SamplingParams",
    "ServerConfig",
    "Session",
    "SessionLease",
    "TransformersPrefixCache",
    "Turn",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
