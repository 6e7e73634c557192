"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters at run time, for admins alone.

Under vLLM's names. A directory is read only if it and its files, whatever links they are, lie
beneath the one that the operator named; what lies elsewhere is refused in the same words whether it
exists or not.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from radixkv.errors import InvalidAdapter
from radixkv.service.http.auth import require_admin
from radixkv.service.http.body import read_body
from radixkv.service.http.errors import HttpError
from radixkv.service.http.fields import Strict
from radixkv.service.http.replies import ModelCard
from radixkv.service.http.serving import SERVING
from radixkv.service.http.sse import json_reply

if TYPE_CHECKING:
    from radixkv.service.engine.adapters import Adapter
    from radixkv.service.engine.engine import Engine


class LoadAdapterRequest(Strict):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(
        min_length=1, max_length=128, description="The model's id will be `<served model>:<name>`."
    )
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="A directory of PEFT, in the server's `--adapter-dir` or relative to it.",
    )
    load_inplace: bool | None = Field(
        None, description="Replace an adapter of that name; without it a taken name is a 400."
    )


class UnloadAdapterRequest(Strict):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=128)


class UnloadedReply(TypedDict):
    """An adapter that is no longer served."""

    id: str
    object: Literal["model"]
    deleted: bool


async def load_adapter(request: web.Request) -> web.Response:
    """Load an adapter, or another in its place; running requests keep what they began with."""
    require_admin(request)
    serving = request.app[SERVING]
    body = await read_body(request, LoadAdapterRequest)
    if body.model_extra:
        raise InvalidAdapter(f"{sorted(body.model_extra)[0]} is no field of this request")
    engine = serving.engine
    folder = await asyncio.to_thread(_allowed, serving.adapter_dir, body.lora_path)
    adapter = await asyncio.to_thread(
        engine.adapters.load, body.lora_name, folder, replace=bool(body.load_inplace)
    )
    return json_reply(adapter_card(engine, adapter))


async def unload_adapter(request: web.Request) -> web.Response:
    """Take an adapter away; requests that run under it go on."""
    require_admin(request)
    body = await read_body(request, UnloadAdapterRequest)
    engine = request.app[SERVING].engine
    # In a thread, for it waits while another adapter is being loaded.
    adapter = await asyncio.to_thread(engine.adapters.unload, body.lora_name)
    reply: UnloadedReply = {
        "id": f"{engine.model_name}:{adapter.name}",
        "object": "model",
        "deleted": True,
    }
    return json_reply(reply)


def adapter_card(engine: Engine, adapter: Adapter) -> ModelCard:
    """Describe an adapter as a model whose parent is the served one."""
    name = f"{engine.model_name}:{adapter.name}"
    return {
        "id": name,
        "object": "model",
        "created": adapter.created,
        "owned_by": "radixkv",
        "root": name,
        "parent": engine.model_name,
        "max_model_len": engine.max_model_len,
    }


def _allowed(adapter_dir: Path | None, path: str) -> Path:
    """Return the directory that a request means; raises a 403 for all that lies outside."""
    if adapter_dir is None:
        raise HttpError(
            403, "this server loads no adapters over HTTP: it was started without --adapter-dir"
        )
    from radixkv.service.engine.peft import CONFIG, WEIGHTS  # torch, which is there by now

    try:
        root = adapter_dir.resolve()
        folder = (root / path).resolve()
        files = [(folder / name).resolve() for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError, RuntimeError):
        folder, files = root, []
    if folder == root or any(root not in at.parents for at in (folder, *files)):
        raise HttpError(
            403,
            "lora_path must be a directory beneath the server's --adapter-dir",
            param="lora_path",
        )
    return folder
