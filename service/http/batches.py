"""/v1/batches: files of requests that are run behind all other work, as OpenAI's Batch API has it.

Knows bodies and answers; how a batch lives is in ``batch/jobs.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from radixkv.service.batch.jobs import Jobs
from radixkv.service.batch.store import Store
from radixkv.service.http.auth import caller_of
from radixkv.service.http.body import read_body
from radixkv.service.http.fields import Strict
from radixkv.service.http.files import JOBS, MAX_PAGE, jobs_of, page_of
from radixkv.service.http.guard import refuse_web_pages
from radixkv.service.http.queries import check_names, whole
from radixkv.service.http.serving import Serving
from radixkv.service.http.sse import json_reply

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class BatchRequest(Strict):
    """The body of `POST /v1/batches`."""

    input_file_id: str = Field(max_length=128)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None


class BatchFault(TypedDict):
    """Why a batch as a whole failed."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    """All of those."""

    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(TypedDict):
    """Requests of the file, those that were answered, and those that got an error."""

    total: int
    completed: int
    failed: int


class InputDetails(TypedDict):
    """Where the prompts' KV came from."""

    cached_tokens: int


class OutputDetails(TypedDict):
    """What the answers' tokens are; what was thought is not told apart, so this is always 0."""

    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Tokens of all requests together, those that a server before a restart answered included."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchReply(TypedDict):
    """One batch. Times are seconds since 1970. `usage` is null until it has run."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


def keep_batches(app: web.Application, serving: Serving) -> None:
    """Let the application keep files and batches, if it has a directory for them.

    Raises InvalidConfig if that cannot be used.
    """
    if serving.batch_dir is None:
        return
    jobs = app[JOBS] = Jobs(serving, Store(serving.batch_dir))
    serving.on_start.append(jobs.start)

    async def stop(_: web.Application) -> None:
        await jobs.stop()

    app.on_shutdown.append(stop)


async def create_batch(request: web.Request) -> web.Response:
    """Record a batch; it begins at once."""
    jobs = jobs_of(request)
    body = await read_body(request, BatchRequest)
    doc = jobs.create(caller_of(request).tenant, body.input_file_id, body.endpoint, body.metadata)
    return json_reply(doc)


async def list_batches(request: web.Request) -> web.Response:
    """List the caller's batches."""
    jobs, tenant = jobs_of(request), caller_of(request).tenant
    check_names(request, ("after", "limit"))
    limit = whole(request, "limit", 20, least=1, most=MAX_PAGE)
    found = jobs.store.batches(tenant, after=request.query.get("after"), limit=limit + 1)
    shown = [jobs.show(batch) for batch in found[:limit]]
    last = shown[-1]["id"] if shown else None
    return json_reply(page_of(shown, last_id=last, more=len(found) > limit))


async def one_batch(request: web.Request) -> web.Response:
    """Tell how far a batch is."""
    jobs = jobs_of(request)
    batch = jobs.get(caller_of(request).tenant, request.match_info["id"])
    return json_reply(jobs.show(batch))


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch early."""
    jobs = jobs_of(request)
    caller = caller_of(request)
    if caller.local:
        refuse_web_pages(request)  # there is no body that would keep them out
    return json_reply(jobs.cancel(caller.tenant, request.match_info["id"]))
