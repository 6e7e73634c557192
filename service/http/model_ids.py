"""Which model ids are served: that of the model, and ``MODEL:NAME`` for each adapter of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from radixkv.errors import AdapterNotFound
from radixkv.service.http.errors import ModelNotFound

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


class _HasEngine(Protocol):
    @property
    def engine(self) -> Engine:
        """The engine; raises Loading before there is one."""


class ModelIds:
    """Reads ids as requests give them; no id, an empty one and ``default`` mean the model."""

    def __init__(self, serving: _HasEngine) -> None:
        self._serving = serving

    def adapter_of(self, given: str | None) -> str | None:
        """Return the name of the adapter that an id means, None for the model alone.

        Raises ModelNotFound for an id that is not served.
        """
        engine = self._serving.engine
        served = engine.model_name
        if given is None or given in ("", "default", served):
            return None
        prefix = f"{served}:"
        if given.startswith(prefix):
            name = given.removeprefix(prefix)
            try:
                engine.adapters.find(name)
                return name
            except AdapterNotFound:
                pass
        raise ModelNotFound(given, served)

    def shown(self, given: str | None) -> str:
        """Return the id to answer under; ``given`` has passed ``adapter_of``."""
        return self._serving.engine.model_name if given in (None, "", "default") else str(given)


MODEL_IDS = web.AppKey("MODEL_IDS", ModelIds)
