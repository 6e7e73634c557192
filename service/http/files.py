"""/v1/files: files of batch requests, uploaded and kept for their tenant, and the results.

Knows multipart bodies and limits; what a batch makes of a file is said elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import TypedDict

from radixkv.errors import InvalidRequest, NotFound
from radixkv.service.batch.jobs import MAX_FILE_BYTES, MAX_TENANT_BYTES, Jobs
from radixkv.service.batch.store import StoredFile
from radixkv.service.http.auth import caller_of
from radixkv.service.http.errors import HttpError
from radixkv.service.http.guard import refuse_web_pages
from radixkv.service.http.queries import check_names, whole
from radixkv.service.http.sse import json_reply

JOBS = web.AppKey("JOBS", Jobs)
MAX_PAGE = 10_000
_CHUNK_BYTES = 256 * 1024
_MAX_FIELD_BYTES = 64 * 1024


class FileReply(TypedDict):
    """One file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """A page of files, the newest first."""

    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    """A file is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


def jobs_of(request: web.Request) -> Jobs:
    """Return what keeps files and batches; raises a 404 that says how to have it."""
    jobs = request.app.get(JOBS)
    if jobs is None:
        raise HttpError(
            404,
            "This server keeps no files and batches: start it with --batch-dir DIR.",
            code="batches_off",
        )
    return jobs


async def upload_file(request: web.Request) -> web.Response:
    """Take a file in: multipart/form-data with ``purpose`` and ``file``, in any order."""
    jobs, tenant = jobs_of(request), caller_of(request).tenant
    if request.content_type != "multipart/form-data":
        raise HttpError(415, f"the body must be multipart/form-data, not {request.content_type!r}")
    if caller_of(request).local:
        refuse_web_pages(request)  # a form can be sent from anywhere without asking
    room = MAX_TENANT_BYTES - jobs.store.used_bytes(tenant)
    path, name, purpose = jobs.store.new_path(), None, None
    try:
        try:
            async for part in _parts(request):
                if part.name == "purpose":
                    purpose = await _text(part)
                elif part.name == "file":
                    if name is not None:
                        raise InvalidRequest("file is given twice", param="file")
                    name = (part.filename or "file.jsonl")[:256]
                    await _receive(part, path, room)
                else:
                    await _text(part)  # such as expires_after: kept until deleted
        except (ValueError, HttpProcessingError) as e:
            raise InvalidRequest(f"the body is no multipart/form-data: {_words(e)}") from None
        if purpose != "batch":
            raise InvalidRequest("purpose must be 'batch'", param="purpose")
        if name is None:
            raise InvalidRequest("missing required parameter: 'file'", param="file")
        file = await asyncio.to_thread(jobs.store.add_file, tenant, name, "batch", path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        raise
    return json_reply(_reply(file))


async def list_files(request: web.Request) -> web.Response:
    """List the caller's files."""
    jobs, tenant = jobs_of(request), caller_of(request).tenant
    check_names(request, ("after", "limit", "purpose", "order"))
    limit = whole(request, "limit", 100, least=1, most=MAX_PAGE)
    purpose = request.query.get("purpose")
    found = jobs.store.files(tenant, after=request.query.get("after"), limit=limit + 1)
    shown = [_reply(file) for file in found[:limit] if purpose in (None, file.purpose)]
    last = found[:limit][-1].id if found else None
    return json_reply(page_of(shown, last_id=last, more=len(found) > limit))


async def one_file(request: web.Request) -> web.Response:
    """Describe a file."""
    return json_reply(_reply(_find(request)))


async def file_content(request: web.Request) -> web.StreamResponse:
    """Send a file's contents."""
    file = _find(request)
    return web.FileResponse(file.path, headers={"Content-Type": "application/x-ndjson"})


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file; 409 while a batch reads it."""
    file, tenant = _find(request), caller_of(request).tenant
    if not await asyncio.to_thread(jobs_of(request).store.delete_file, tenant, file.id):
        raise HttpError(409, "A batch that is not over reads this file.", code="file_in_use")
    reply: FileDeleted = {"id": file.id, "object": "file", "deleted": True}
    return json_reply(reply)


def _find(request: web.Request) -> StoredFile:
    jobs, file_id = jobs_of(request), request.match_info["id"]
    file = jobs.store.file(caller_of(request).tenant, file_id)
    if file is None:
        raise NotFound(f"there is no file {file_id[:80]!r}")
    return file


def _words(error: ValueError | HttpProcessingError) -> str:
    """Return what a parser says, in one line."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    return " ".join(text.split())[:200]


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    reader = await request.multipart()
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise InvalidRequest("the body has a part that has parts itself")
        yield part


async def _text(part: BodyPartReader) -> str:
    raw = b""
    while chunk := await part.read_chunk(_MAX_FIELD_BYTES):
        raw += chunk
        if len(raw) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{str(part.name)[:40]} is too long", param=str(part.name)[:40])
    return raw.decode("utf-8", "replace")


async def _receive(part: BodyPartReader, path: Path, room: int) -> None:
    """Write the part to the disk as it comes; raises a 413 beyond the limits."""
    taken = 0
    with path.open("wb") as file:
        while chunk := await part.read_chunk(_CHUNK_BYTES):
            taken += len(chunk)
            if taken > MAX_FILE_BYTES:
                raise HttpError(
                    413, f"The file has more than {MAX_FILE_BYTES} bytes.", param="file"
                )
            if taken > room:
                raise HttpError(
                    413,
                    f"Your files may have {MAX_TENANT_BYTES} bytes together; delete some.",
                    code="quota_exceeded",
                    param="file",
                )
            await asyncio.to_thread(file.write, chunk)
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())


def _reply(file: StoredFile) -> FileReply:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def page_of(shown: Sequence[Any], *, last_id: str | None, more: bool) -> dict[str, Any]:
    """Return a page of objects that have ids; the next one begins behind ``last_id``."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": last_id,
        "has_more": more,
    }
