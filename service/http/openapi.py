"""GET /openapi.json: the service described in OpenAPI 3.1, from the models that check its bodies.

A route that is not in ``ROUTES`` fails a test, so the document cannot fall behind.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

import radixkv
from radixkv.service.http.anthropic_errors import AnthropicError, speaks_anthropic
from radixkv.service.http.auth import OPEN_PATHS
from radixkv.service.http.errors import ErrorReply
from radixkv.service.http.openapi_routes import ROUTES, Route
from radixkv.service.http.sse import json_reply

_ERRORS = {
    400: "The request cannot be served; `param` names the field at fault. A prompt that is too "
    "long has the code `context_length_exceeded`.",
    401: "No key that opens this, where the server asks for one.",
    403: "Not allowed for this caller.",
    404: "No such model or route.",
    409: "Not possible now; the message says why.",
    413: "The body is larger than `max_body`.",
    415: "The body is not declared as JSON.",
    429: "The queue is full (`queue_full`), or a limit of the caller's tenant is met "
    "(`rate_limit_exceeded`, and `limit` says which); `Retry-After` says when to try again.",
    500: "A bug; the log has the details under the request's id.",
    503: "The model is loading, the server is stopping, or the engine has died.",
}

_EVENTS = (
    "With `stream: true`: events `data: <JSON>`, each separated by an empty line; comments "
    "(`: ping`) in between while nothing happens; `data: [DONE]` last. An error after the start is "
    "one event with an error object, and ends the stream without `[DONE]`."
)
_PLAIN_EVENTS = (
    "Events `data: <JSON>`, each separated by an empty line, for as long as the client listens; "
    "comments (`: ping`) in between while nothing happens."
)
_NAMED_EVENTS = (
    "With `stream: true`: events `event: <type>` and `data: <JSON>`, each separated by an empty "
    "line, from `message_start` to `message_stop`; a comment or a `ping` while nothing happens. An "
    "error after the start is one event `error`, and ends the stream."
)


async def openapi(request: web.Request) -> web.Response:
    """Describe the service."""
    return json_reply(document())


@cache
def document() -> dict[str, Any]:
    """Build the document, once."""
    types = {
        (role, route.name): kind
        for route in ROUTES
        for role, kind in (("reply", route.reply), ("body", route.body), ("event", route.events))
        if kind is not None
    }
    inputs: list[tuple[Any, JsonSchemaMode, TypeAdapter[Any]]] = [
        (key, "validation", TypeAdapter(kind)) for key, kind in types.items()
    ]
    inputs.append(("error", "validation", TypeAdapter(ErrorReply)))
    inputs.append(("anthropic_error", "validation", TypeAdapter(AnthropicError)))
    refs, shared = TypeAdapter.json_schemas(
        inputs,
        ref_template="#/components/schemas/{model}",
        schema_generator=GenerateJsonSchema,
    )
    schemas = {key: schema for (key, _), schema in refs.items()}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "radixkv",
            "version": radixkv.__version__,
            "description": "Text generation with an exact prefix cache, for OpenAI's and "
            "Anthropic's clients.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": shared.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "headers": {
                "RequestId": {
                    "description": "The caller's X-Request-Id, or one that we made.",
                    "schema": {"type": "string"},
                }
            },
        },
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
    anthropic = speaks_anthropic(route.path)
    error = schemas["anthropic_error" if anthropic else "error"]
    answer: dict[str, Any] = {}
    if route.reply is not None:
        answer["application/json"] = {"schema": schemas["reply", route.name]}
    elif route.events is None:
        kind = "text/html" if route.path == "/dashboard" else "text/plain"
        answer[kind] = {"schema": {"type": "string"}}
    if route.events is not None:
        answer["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": _NAMED_EVENTS
                if anthropic
                else _EVENTS
                if route.body is not None
                else _PLAIN_EVENTS,
                "contentMediaType": "application/json",
                "contentSchema": {"oneOf": [schemas["event", route.name], error]},
            }
        }
    responses: dict[str, Any] = {
        "200": {"description": route.summary + ".", "headers": headers, "content": answer}
    }
    keyed = route.path not in OPEN_PATHS
    for status in sorted({*route.errors, 401} if keyed else route.errors):
        more = {"Retry-After": {"schema": {"type": "integer"}}} if status in (429, 503) else {}
        responses[str(status)] = {
            "description": _ERRORS[status],
            "headers": headers | more,
            "content": {"application/json": {"schema": error}},
        }
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "responses": responses,
    }
    if keyed:
        operation["security"] = [{"bearer": []}, {"header": []}, {}]  # {}: servers without tenants
    parameters: list[dict[str, Any]] = [
        {"name": q.name, "in": "query", "schema": q.schema, "description": q.description}
        for q in route.query
    ]
    for name in re.findall(r"{(\w+)}", route.path):
        parameters.append(
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        )
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas["body", route.name]}},
        }
    if route.form is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": route.form}},
        }
    return operation
