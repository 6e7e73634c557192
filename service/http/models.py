"""The routes that say what is served and whether it is: models, health, version, load, metrics.

None of them waits for the engine: they read what it last said of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

import radixkv
from radixkv.errors import EngineDead
from radixkv.service.http.adapters import adapter_card
from radixkv.service.http.auth import caller_of, only_admins
from radixkv.service.http.errors import ModelNotFound
from radixkv.service.http.replies import HealthReply, LoadReply, ModelCard, ModelList, VersionReply
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply
from radixkv.service.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


async def health(request: web.Request) -> web.Response:
    """Answer 200 while the engine serves, 503 while it loads and after it died."""
    engine = request.app[SERVING].engine
    if not engine.alive:
        raise EngineDead("The engine has stopped; restart the server.")
    reply: HealthReply = {"status": "ok"}
    return json_reply(reply)


async def list_models(request: web.Request) -> web.Response:
    """List the model that is served, and the adapters of it."""
    engine = request.app[SERVING].engine
    cards = [_card(engine), *(adapter_card(engine, a) for a in engine.adapters.all())]
    reply: ModelList = {"object": "list", "data": cards}
    return json_reply(reply)


async def one_model(request: web.Request) -> web.Response:
    """Describe a model by its id, which may contain slashes."""
    serving, given = request.app[SERVING], request.match_info["model"]
    if given == "default":  # a word for requests, no model's id
        raise ModelNotFound(given, serving.engine.model_name)
    adapter = serving.engine.adapters.find(serving.models.adapter_of(given))
    if adapter is not None:
        return json_reply(adapter_card(serving.engine, adapter))
    return json_reply(_card(serving.engine))


async def version(request: web.Request) -> web.Response:
    """Tell the version."""
    reply: VersionReply = {"version": radixkv.__version__}
    return json_reply(reply)


async def load(request: web.Request) -> web.Response:
    """Tell how many sequences run or wait: all to an admin, to others their own."""
    caller, stats = caller_of(request), request.app[SERVING].engine.stats()
    number = stats.num_running + stats.num_waiting
    if not caller.is_admin and caller.limits is not None:
        number = caller.limits.in_flight
    reply: LoadReply = {"server_load": number}
    return json_reply(reply)


async def metrics(request: web.Request) -> web.Response:
    """Show counters and histograms to Prometheus, also while the model loads.

    They are of all tenants, so where there are keys it takes an admin's, or `--open-metrics`.
    """
    serving = request.app[SERVING]
    if request.path not in serving.gate.open_paths:
        only_admins(request)
    body = serving.metrics.expose()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _card(engine: Engine) -> ModelCard:
    return {
        "id": engine.model_name,
        "object": "model",
        "created": engine.created,
        "owned_by": "radixkv",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }
