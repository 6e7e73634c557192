"""The document describes every route, refers to nothing that is missing, and matches the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixkv.service.http.app import build_app
from radixkv.service.http.openapi import document
from radixkv.service.http.serving import Serving


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_every_route_is_described_and_no_other() -> None:
    app = build_app(Serving(), max_body=2**20)
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, item in document()["paths"].items() for method in item}
    assert served == described


def test_every_reference_leads_somewhere() -> None:
    doc = document()
    found = set(references(doc))
    assert "#/components/schemas/ChatRequest" in found
    for reference in found:
        node = doc
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_the_skeleton_is_openapi_3_1() -> None:
    doc = document()
    assert doc["openapi"] == "3.1.0"
    assert set(doc) == {"openapi", "info", "servers", "paths", "components"}
    assert {"title", "version"} <= set(doc["info"])
    ids = [op["operationId"] for item in doc["paths"].values() for op in item.values()]
    assert len(ids) == len(set(ids))
    for path, item in doc["paths"].items():
        for operation in item.values():
            assert set(operation) <= {
                "operationId",
                "summary",
                "tags",
                "responses",
                "parameters",
                "requestBody",
                "security",
            }
            assert "200" in operation["responses"]
            for response in operation["responses"].values():
                assert response["description"] and response["content"]
            named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_streams_and_errors_are_described() -> None:
    chat = document()["paths"]["/v1/chat/completions"]["post"]
    events = chat["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert {r["$ref"].rpartition("/")[2] for r in events["contentSchema"]["oneOf"]} == {
        "ChatChunk",
        "ErrorReply",
    }
    assert set(chat["responses"]) == {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
    assert "Retry-After" in chat["responses"]["429"]["headers"]


def test_prompts_are_described_in_all_their_shapes() -> None:
    prompt = document()["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert len(prompt["anyOf"]) == 4
