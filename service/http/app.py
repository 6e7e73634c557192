"""The routes of the service and the order of its middlewares."""

from __future__ import annotations

from aiohttp import web

from radixkv.service.http.cache_api import cache_reset, cache_stats
from radixkv.service.http.chat import chat_completions
from radixkv.service.http.completions import completions
from radixkv.service.http.errors import errors_to_json
from radixkv.service.http.models import health, list_models, load, metrics, one_model, version
from radixkv.service.http.observe import add_headers, observing
from radixkv.service.http.openapi import openapi
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.tokens import detokenize, tokenize


def build_app(serving: Serving, *, max_body: int) -> web.Application:
    """Build the application around what its handlers share."""
    app = web.Application(
        middlewares=[observing(serving.metrics.count_answer), errors_to_json],
        client_max_size=max_body,
    )
    app[SERVING] = serving
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", one_model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/v1/cache/stats", cache_stats),
            web.post("/v1/cache/reset", cache_reset),
            web.post("/reset_prefix_cache", cache_reset),
            web.get("/health", health),
            web.get("/v1/health", health),
            web.get("/ping", health),
            web.get("/version", version),
            web.get("/load", load),
            web.get("/metrics", metrics),
            web.get("/openapi.json", openapi),
        ]
    )
    return app
