"""Runs the batches of a server behind its other work, and again after a restart.

Knows the life of a batch and who owns it; nothing of HTTP. Each tenant's batches run one after the
other, those of different tenants beside each other, and the engine shares them out by weight.

    validating -> in_progress -> finalizing -> completed
        |             |-> cancelling -> cancelled     what was answered is kept
        |             `-> expired                     the same, when the window is over
        `-> failed                                    the file as a whole is no batch

A server that stops or dies leaves them as they are; the next one goes on where this one ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from radixkv.errors import InvalidRequest, NotFound, Overloaded
from radixkv.service.batch.asks import Asks
from radixkv.service.batch.lines import count_lines
from radixkv.service.batch.results import Done, ResultFile, Spent, recover
from radixkv.service.batch.run import BatchRun
from radixkv.service.batch.store import Store, StoredBatch
from radixkv.service.batch.tally import BatchStopped, Tally
from radixkv.service.engine.params import Usage
from radixkv.service.http.serving import Serving

log = logging.getLogger("radixkv.batch")
MAX_LINES = 50_000
MAX_FILE_BYTES = 200 * 10**6
MAX_TENANT_BYTES = 2 * 10**9
MAX_UNFINISHED = 50
WINDOW_S = 24 * 3600
_PLAN_BYTES = 64 * 2**20


class Jobs:
    """All batches of one server; for its event loop."""

    def __init__(self, serving: Serving, store: Store) -> None:
        self.store = store
        self._serving = serving
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, asyncio.Task[Tally]] = {}
        self._tallies: dict[str, tuple[int, int, Tally]] = {}
        self._started = False

    def start(self) -> None:
        """Go on with what is not finished; the engine serves."""
        self._started = True
        for tenant in dict.fromkeys(batch.tenant for batch in self.store.unfinished()):
            self._work_on(tenant)

    async def stop(self) -> None:
        """End the runs, and leave the batches to the next server."""
        self._started = False
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)
        self.store.close()

    def create(
        self, tenant: str, input_file_id: str, endpoint: str, metadata: dict[str, str] | None
    ) -> dict[str, Any]:
        """Record a batch and begin; raises NotFound, InvalidRequest or Overloaded."""
        file = self.store.file(tenant, input_file_id)
        if file is None:
            raise NotFound(f"there is no file {input_file_id[:80]!r}", param="input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest(
                f"the file's purpose is {file.purpose!r}; wanted 'batch'", param="input_file_id"
            )
        if len(self.store.unfinished(tenant)) >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} of your batches wait or run", retry_after_s=60)
        now = int(time.time())
        doc: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + WINDOW_S,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "usage": None,
            "metadata": metadata,
        }
        self.store.add_batch(tenant, doc)
        self._work_on(tenant)
        return doc

    def show(self, batch: StoredBatch) -> dict[str, Any]:
        """Return the batch object, with the counts of now."""
        batch.doc.setdefault("usage", None)  # one that an older server recorded has none
        if batch.id in self._tallies:
            batch.doc["request_counts"] |= _counts(*self._tallies[batch.id])
        return batch.doc

    def get(self, tenant: str, batch_id: str) -> StoredBatch:
        """Return a batch of the tenant; raises NotFound."""
        batch = self.store.batch(tenant, batch_id)
        if batch is None:
            raise NotFound(f"there is no batch {batch_id[:80]!r}")
        return batch

    def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Begin to end a batch; what was answered is kept. Nothing changes for one that is over."""
        batch = self.get(tenant, batch_id)
        if batch.doc["status"] in ("validating", "in_progress"):
            _set(batch, "cancelling")
            self.store.update(batch)
            run = self._runs.get(batch_id)
            if run is not None:
                run.cancel()
            self._work_on(tenant)
        return self.show(batch)

    # ---- working --------------------------------------------------------------------------------

    def _work_on(self, tenant: str) -> None:
        if self._started and tenant not in self._workers:
            self._workers[tenant] = asyncio.create_task(self._work(tenant))

    async def _work(self, tenant: str) -> None:
        """Do a tenant's batches, the oldest first."""
        try:
            while batches := self.store.unfinished(tenant):
                # One that is to end goes first: it only has to be closed.
                batch = min(batches, key=lambda b: b.doc["status"] != "cancelling")
                try:
                    await self._do(batch)
                except BatchStopped:
                    return  # the engine is gone; the next server goes on
                except Exception:
                    log.exception("a batch failed", extra={"fields": {"batch": batch.id}})
                    self._fail(batch, "internal_error", "The server had an error; see its log.")
        finally:
            self._workers.pop(tenant, None)

    async def _do(self, batch: StoredBatch) -> None:
        doc = batch.doc
        source = self.store.file(batch.tenant, doc["input_file_id"])
        if source is None:
            return self._fail(batch, "invalid_input_file", "The input file is gone.")
        if doc["status"] == "validating":
            total = await asyncio.to_thread(count_lines, source.path)
            if self._is_cancelling(batch):
                return None
            if not 0 < total <= MAX_LINES:
                return self._fail(
                    batch, "invalid_input_file", f"It has {total} lines; wanted 1 to {MAX_LINES}."
                )
            doc["request_counts"]["total"] = total
            _set(batch, "in_progress")
            self.store.update(batch)
        answers, errors = (self.store.result_path(batch.id, kind) for kind in ("out", "err"))
        done = Done()
        answered, _ = await asyncio.to_thread(recover, answers, done)
        _, refused = await asyncio.to_thread(recover, errors, done)
        counts, end, tally = (answered, refused), "completed", Tally()
        if doc["status"] == "in_progress" and not self._is_cancelling(batch):
            with ResultFile(answers) as good, ResultFile(errors) as bad:
                run = BatchRun(
                    self._serving.engine,
                    Asks(self._serving, batch.tenant),
                    source.path,
                    answers=good,
                    errors=bad,
                    done=done,
                    url=doc["endpoint"],
                    share=self._serving.engine.config.batch_share,
                    memory_bytes=_PLAN_BYTES,
                    on_usage=lambda usage: self._count(batch.tenant, usage),
                )
                tally = run.tally
                self._tallies[batch.id] = (*counts, tally)
                task = self._runs[batch.id] = asyncio.create_task(run.run())
                try:
                    async with asyncio.timeout(doc["expires_at"] - time.time()):
                        await task
                except TimeoutError:
                    end = "expired"
                except asyncio.CancelledError:
                    if not self._is_cancelling(batch) or not self._started:
                        raise  # the server stops
                    end = "cancelled"
                finally:
                    del self._runs[batch.id], self._tallies[batch.id]
                    if not task.done():
                        task.cancel()
                        await asyncio.wait([task])
        if self._is_cancelling(batch):
            end = "cancelled"
            doc.update(self.get(batch.tenant, batch.id).doc)
        doc["request_counts"] |= _counts(*counts, tally)
        doc["usage"] = _usage(done.spent, tally)
        if end == "completed":
            doc["finalizing_at"] = doc["finalizing_at"] or int(time.time())
        _set(batch, end)
        self.store.finish(
            batch,
            {
                "output_file_id": (f"{batch.id}_output.jsonl", answers),
                "error_file_id": (f"{batch.id}_error.jsonl", errors),
            },
        )
        return None

    def _is_cancelling(self, batch: StoredBatch) -> bool:
        return bool(self.get(batch.tenant, batch.id).doc["status"] == "cancelling")

    def _fail(self, batch: StoredBatch, code: str, message: str) -> None:
        batch.doc["errors"] = {
            "object": "list",
            "data": [{"code": code, "message": message, "param": None, "line": None}],
        }
        _set(batch, "failed")
        self.store.update(batch)

    def _count(self, tenant: str, usage: Usage) -> None:
        if self._serving.metrics.tenants is not None:
            self._serving.metrics.tenants.count_usage(tenant, usage)


def _set(batch: StoredBatch, status: str) -> None:
    batch.doc["status"] = status
    batch.doc[f"{status}_at"] = int(time.time())


def _counts(answers: int, errors: int, tally: Tally) -> dict[str, int]:
    return {"completed": answers + tally.answered, "failed": errors + tally.refused}


def _usage(before: Spent, tally: Tally) -> dict[str, Any]:
    """Sum up what runs before this one wrote, and what this one asked."""
    prompt = before.prompt + tally.prompt_tokens
    completion = before.completion + tally.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": before.cached + tally.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
