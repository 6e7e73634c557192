"""The table of the service's routes: what each reads and answers, and in which errors it may end.

Knows the models of bodies and answers; nothing of OpenAPI's document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.service.http.adapters import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UnloadedReply,
)
from radixkv.service.http.anthropic_replies import MessageEvent, MessageReply, TokenCount
from radixkv.service.http.anthropic_schema import CountTokensRequest, MessagesRequest
from radixkv.service.http.batches import BatchList, BatchReply, BatchRequest
from radixkv.service.http.cache_api import CacheResetReply
from radixkv.service.http.cache_events import DroppedReply, EventReply
from radixkv.service.http.cache_explain import ExplainMessageRequest, ExplainRequest
from radixkv.service.http.cache_stats_shapes import CacheStatsReply
from radixkv.service.http.cache_tree import MAX_DEPTH, MAX_NODES, TreeReply
from radixkv.service.http.explain_shapes import ExplainReply
from radixkv.service.http.files import FileDeleted, FileList, FileReply
from radixkv.service.http.pins_schema import (
    PinList,
    PinMessageRequest,
    PinReply,
    PinRequest,
    PrewarmMessageRequest,
    PrewarmReply,
    PrewarmRequest,
    UnpinReply,
    UnpinRequest,
)
from radixkv.service.http.public import (
    PublicDeleted,
    PublicList,
    PublicReply,
    PublicRequest,
)
from radixkv.service.http.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    HealthReply,
    LoadReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    VersionReply,
)
from radixkv.service.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODY_ERRORS = (400, 404, 413, 415, 429, 500, 503)
_ADMIN_ERRORS = (400, 403, 404, 413, 415, 500, 503)


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter in the query string."""

    name: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the service."""

    method: str
    path: str
    name: str
    summary: str
    tag: str
    reply: Any = None
    """None: plain text."""
    body: Any = None
    events: Any = None
    """What each server-sent event holds, if the answer can be streamed."""
    errors: tuple[int, ...] = (500, 503)
    query: tuple[Query, ...] = ()
    form: dict[str, Any] | None = None
    """The schema of a body that is a form with files, not JSON."""


_WINDOW = Query(
    "window",
    {"type": "string", "examples": ["90s", "5m", "1h"]},
    "Also show what was counted in this time until now; up to 6h.",
)
_BY = Query(
    "by",
    {"type": "string", "enum": ["tenant", "identity", "prompt_cache_key"]},
    "What the window's counts are told apart by; default: tenant.",
)
_DEPTH = Query(
    "depth",
    {"type": "integer", "minimum": 0, "maximum": MAX_DEPTH, "default": 8},
    "Levels below the roots.",
)
_LIMIT = Query(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MAX_NODES, "default": 1000},
    "Nodes in full; what is left out below a parent is one entry more.",
)
_AFTER = Query("after", {"type": "string"}, "Begin behind the one of this id.")
_PAGE = Query(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": 10000, "default": 100},
    "How many, the newest first.",
)
_PURPOSE = Query("purpose", {"type": "string"}, "Only files of this purpose.")
_TEXT = Query("text", {"type": "boolean", "default": False}, "Show how edges begin, where allowed.")

_UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary", "description": "One request a line."},
    },
    "required": ["purpose", "file"],
}

ROUTES = (
    Route("post", "/v1/chat/completions", "createChatCompletion", "Answer a chat", "generation",
          ChatReply, ChatRequest, ChatChunk, _BODY_ERRORS),
    Route("post", "/v1/completions", "createCompletion", "Complete prompts", "generation",
          CompletionReply, CompletionRequest, CompletionReply, _BODY_ERRORS),
    Route("post", "/v1/messages", "createMessage", "Answer a chat of Anthropic's clients",
          "generation", MessageReply, MessagesRequest, MessageEvent, _BODY_ERRORS),
    Route("post", "/v1/messages/count_tokens", "countMessageTokens",
          "Count the tokens of such a chat", "generation", TokenCount, CountTokensRequest,
          errors=_BODY_ERRORS),
    Route("get", "/v1/models", "listModels", "List the served models", "models", ModelList),
    Route("get", "/v1/models/{model}", "retrieveModel", "Describe a served model", "models",
          ModelCard, errors=(404, 500, 503)),
    Route("post", "/v1/load_lora_adapter", "loadAdapter", "Load a LoRA adapter", "models",
          ModelCard, LoadAdapterRequest, errors=_ADMIN_ERRORS),
    Route("post", "/v1/unload_lora_adapter", "unloadAdapter", "Take a LoRA adapter away",
          "models", UnloadedReply, UnloadAdapterRequest, errors=_ADMIN_ERRORS),
    Route("post", "/tokenize", "tokenize", "Turn text or a chat into token ids", "tokens",
          TokenizeReply, TokenizeRequest, errors=_BODY_ERRORS),
    Route("post", "/detokenize", "detokenize", "Turn token ids into text", "tokens",
          DetokenizeReply, DetokenizeRequest, errors=_BODY_ERRORS),
    Route("get", "/v1/files", "listFiles", "List your files", "batches", FileList,
          errors=(400, 404, 500, 503), query=(_AFTER, _PAGE, _PURPOSE)),
    Route("post", "/v1/files", "uploadFile",
          "Upload a file of batch requests (multipart: `purpose` = `batch`, and `file`)", "batches",
          FileReply, errors=_BODY_ERRORS, form=_UPLOAD),
    Route("get", "/v1/files/{id}", "retrieveFile", "Describe a file", "batches", FileReply,
          errors=(404, 500, 503)),
    Route("get", "/v1/files/{id}/content", "downloadFile", "Download a file", "batches",
          errors=(404, 500, 503)),
    Route("delete", "/v1/files/{id}", "deleteFile", "Delete a file", "batches", FileDeleted,
          errors=(404, 409, 500, 503)),
    Route("get", "/v1/batches", "listBatches", "List your batches", "batches", BatchList,
          errors=(400, 404, 500, 503), query=(_AFTER, _PAGE)),
    Route("post", "/v1/batches", "createBatch", "Run a file of requests behind other work",
          "batches", BatchReply, BatchRequest, errors=_BODY_ERRORS),
    Route("get", "/v1/batches/{id}", "retrieveBatch", "Tell how far a batch is", "batches",
          BatchReply, errors=(404, 500, 503)),
    Route("post", "/v1/batches/{id}/cancel", "cancelBatch",
          "End a batch; what was answered is kept", "batches", BatchReply,
          errors=(404, 500, 503)),
    Route("get", "/v1/cache/pins", "listPins", "List what is pinned", "cache", PinList,
          errors=(400, 500, 503)),
    Route("post", "/v1/cache/pin", "pinPrompt", "Compute a prompt and pin it", "cache",
          PinReply, PinRequest | PinMessageRequest,
          errors=(400, 404, 409, 413, 415, 429, 500, 503)),
    Route("post", "/v1/cache/unpin", "unpinPrompt", "Let a pin go", "cache", UnpinReply,
          UnpinRequest, errors=(400, 404, 413, 415, 500, 503)),
    Route("post", "/v1/cache/prewarm", "prewarmPrompt", "Compute a prompt without an answer",
          "cache", PrewarmReply, PrewarmRequest | PrewarmMessageRequest,
          errors=_BODY_ERRORS),
    Route("get", "/v1/cache/stats", "cacheStats", "Show what the cache holds and gave", "cache",
          CacheStatsReply, errors=(400, 500, 503), query=(_WINDOW, _BY)),
    Route("post", "/v1/cache/explain", "cacheExplain",
          "Explain what of a prompt is cached, and why not the rest", "cache",
          ExplainReply, ExplainRequest | ExplainMessageRequest, errors=_BODY_ERRORS),
    Route("get", "/v1/cache/tree", "cacheTree", "Show the radix tree for drawing", "cache",
          TreeReply, errors=(400, 500, 503), query=(_DEPTH, _LIMIT, _TEXT)),
    Route("get", "/v1/cache/events", "cacheEvents", "Hear what happens in the cache", "cache",
          events=EventReply | DroppedReply, errors=(400, 429, 500, 503)),
    Route("post", "/v1/cache/reset", "cacheReset", "Empty the cache", "cache",
          CacheResetReply, errors=(403, 409, 500, 503)),
    Route("post", "/reset_prefix_cache", "resetPrefixCache", "Empty the cache (vLLM's path)",
          "cache", CacheResetReply, errors=(403, 409, 500, 503)),
    Route("get", "/v1/cache/public", "listPublicPrompts", "List the prompts that all share",
          "cache", PublicList, errors=(403, 500, 503)),
    Route("post", "/v1/cache/public", "declarePublicPrompt",
          "Let all tenants share a prompt, and compute it", "cache", PublicReply, PublicRequest,
          errors=(400, 403, 404, 413, 415, 429, 500, 503)),
    Route("delete", "/v1/cache/public/{id}", "withdrawPublicPrompt",
          "Let tenants share a prompt no more", "cache", PublicDeleted,
          errors=(403, 404, 500, 503)),
    Route("get", "/health", "health", "Tell whether the engine serves", "operation", HealthReply),
    Route("get", "/v1/health", "healthV1", "The same under llama.cpp's path", "operation",
          HealthReply),
    Route("get", "/ping", "ping", "The same under SageMaker's path", "operation", HealthReply),
    Route("get", "/version", "version", "Tell the version", "operation", VersionReply,
          errors=(500,)),
    Route("get", "/load", "load", "Count running and waiting sequences", "operation", LoadReply),
    Route("get", "/metrics", "metrics", "Show metrics to Prometheus", "operation",
          errors=(403, 500)),
    Route("get", "/dashboard", "dashboard", "Show the cache in a browser", "operation",
          errors=(500,)),
    Route("get", "/openapi.json", "openapi", "This document", "operation", dict[str, Any],
          errors=(500,)),
)  # fmt: skip
