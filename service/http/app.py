"""The routes of the service and the order of its middlewares."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from radixkv.service.http.adapters import load_adapter, unload_adapter
from radixkv.service.http.anthropic import count_tokens, create_message
from radixkv.service.http.auth import add_limit_headers, authenticating
from radixkv.service.http.batches import (
    cancel_batch,
    create_batch,
    keep_batches,
    list_batches,
    one_batch,
)
from radixkv.service.http.cache_api import cache_reset
from radixkv.service.http.cache_events import LISTENERS, Listeners, cache_events, end_listening
from radixkv.service.http.cache_explain import cache_explain
from radixkv.service.http.cache_stats import cache_stats
from radixkv.service.http.cache_tree import cache_tree
from radixkv.service.http.chat import chat_completions
from radixkv.service.http.completions import completions
from radixkv.service.http.dashboard import dashboard
from radixkv.service.http.errors import errors_to_json
from radixkv.service.http.extras import PROMPTS
from radixkv.service.http.files import (
    delete_file,
    file_content,
    list_files,
    one_file,
    upload_file,
)
from radixkv.service.http.guard import answer_expect, only_loopback_names
from radixkv.service.http.model_ids import MODEL_IDS
from radixkv.service.http.models import health, list_models, load, metrics, one_model, version
from radixkv.service.http.observe import add_headers, observing
from radixkv.service.http.openapi import openapi
from radixkv.service.http.pace import PACE, Pace
from radixkv.service.http.past_prompts import PromptMemory
from radixkv.service.http.pins import list_pins, pin, prewarm, unpin
from radixkv.service.http.public import declare_public, list_public, withdraw_public
from radixkv.service.http.serving import SERVING, Serving
from radixkv.service.http.tokens import detokenize, tokenize


def build_app(serving: Serving, *, max_body: int, loopback_only: bool = False) -> web.Application:
    """Build the application around what its handlers share.

    ``loopback_only`` answers to names of this machine alone: for a server that only it can reach.
    """
    middlewares: list[Middleware] = [
        observing(serving.metrics.count_answer),
        errors_to_json,
    ]
    if loopback_only:
        middlewares.append(only_loopback_names)
    middlewares.append(authenticating(serving.gate, serving.metrics.tenants))
    app = web.Application(middlewares=middlewares, client_max_size=max_body)
    app[SERVING] = serving
    app[MODEL_IDS] = serving.models
    app[PROMPTS] = PromptMemory()
    app[LISTENERS] = Listeners()
    app[PACE] = Pace()
    app.on_shutdown.append(end_listening)
    keep_batches(app, serving)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_limit_headers)
    app.add_routes(
        [
            _post("/v1/chat/completions", chat_completions),
            _post("/v1/completions", completions),
            _post("/v1/messages", create_message),
            _post("/v1/messages/count_tokens", count_tokens),
            _get("/v1/models", list_models),
            _get("/v1/models/{model:.+}", one_model),
            _post("/v1/load_lora_adapter", load_adapter),
            _post("/v1/unload_lora_adapter", unload_adapter),
            _post("/tokenize", tokenize),
            _post("/detokenize", detokenize),
            _get("/v1/files", list_files),
            _post("/v1/files", upload_file),
            _get("/v1/files/{id}", one_file),
            _get("/v1/files/{id}/content", file_content),
            _delete("/v1/files/{id}", delete_file),
            _get("/v1/batches", list_batches),
            _post("/v1/batches", create_batch),
            _get("/v1/batches/{id}", one_batch),
            _post("/v1/batches/{id}/cancel", cancel_batch),
            _get("/v1/cache/pins", list_pins),
            _post("/v1/cache/pin", pin),
            _post("/v1/cache/unpin", unpin),
            _post("/v1/cache/prewarm", prewarm),
            _get("/v1/cache/stats", cache_stats),
            _post("/v1/cache/explain", cache_explain),
            # A HEAD would be answered for ever, without a body by which its client could tell.
            web.get(
                "/v1/cache/events", cache_events, allow_head=False, expect_handler=answer_expect
            ),
            _get("/v1/cache/tree", cache_tree),
            _post("/v1/cache/reset", cache_reset),
            _post("/reset_prefix_cache", cache_reset),
            _get("/v1/cache/public", list_public),
            _post("/v1/cache/public", declare_public),
            _delete("/v1/cache/public/{id}", withdraw_public),
            _get("/health", health),
            _get("/v1/health", health),
            _get("/ping", health),
            _get("/version", version),
            _get("/load", load),
            _get("/metrics", metrics),
            _get("/openapi.json", openapi),
            _get("/dashboard", dashboard),
        ]
    )
    return app


def _get(path: str, handler: Handler) -> web.RouteDef:
    return web.get(path, handler, expect_handler=answer_expect)


def _delete(path: str, handler: Handler) -> web.RouteDef:
    return web.delete(path, handler, expect_handler=answer_expect)


def _post(path: str, handler: Handler) -> web.RouteDef:
    return web.post(path, handler, expect_handler=answer_expect)
