"""Files and batches on disk, by tenant: rows in SQLite, contents beside them; survives a kill.

Knows records and their owners; nothing of HTTP, engines or what a batch does. Every change is
committed to the disk before the call returns. One server uses a directory at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidConfig

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL,
    path TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, input TEXT NOT NULL, doc TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (tenant, seq);
CREATE INDEX IF NOT EXISTS batches_of ON batches (tenant, seq);
"""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_OPEN = ",".join(f"'{status}'" for status in UNFINISHED)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of one tenant."""

    id: str
    name: str
    purpose: str
    num_bytes: int
    created: int
    path: Path


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One batch of one tenant; ``doc`` is the batch object as clients see it."""

    id: str
    tenant: str
    doc: dict[str, Any]


class Store:
    """The records under one directory. May be used from several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidConfig if the directory cannot be used, or another server uses it."""
        self._contents = directory / "files"
        try:
            self._contents.mkdir(parents=True, exist_ok=True)
            os.chmod(directory, 0o700)
            self._db = sqlite3.connect(
                directory / "batches.sqlite", timeout=1, check_same_thread=False
            )
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as e:
            raise InvalidConfig(
                f"batch_dir {directory} cannot be used ({e}); does another server use it?"
            ) from e
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let the directory go."""
        with self._lock:
            self._db.close()

    def new_path(self) -> Path:
        """Return where a file that is being made may be written."""
        return self._contents / uuid.uuid4().hex

    def result_path(self, batch_id: str, kind: str) -> Path:
        """Return where a batch writes its results of a kind, in every run of it."""
        return self._contents / f"{batch_id}.{kind}"

    # ---- files ----------------------------------------------------------------------------------

    def add_file(self, tenant: str, name: str, purpose: str, path: Path) -> StoredFile:
        """Take a file whose contents lie at ``path`` into the records."""
        with self._lock, self._db:
            file_id = self._insert_file(tenant, name, purpose, path)
        found = self.file(tenant, file_id)
        assert found is not None
        return found

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Return a file, if it is the tenant's."""
        found = self._all("SELECT * FROM files WHERE tenant = ? AND id = ?", tenant, file_id)
        return _file(found[0]) if found else None

    def files(self, tenant: str, *, after: str | None, limit: int) -> list[StoredFile]:
        """Return up to ``limit`` files, the newest first, that are older than ``after``."""
        rows = self._page("files", tenant, after, limit)
        return [_file(row) for row in rows]

    def used_bytes(self, tenant: str) -> int:
        """Return what the tenant's files take on the disk."""
        ((total,),) = self._all(
            "SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", tenant
        )
        return int(total)

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; False, and nothing is changed, while a batch that goes on reads it."""
        file = self.file(tenant, file_id)
        with self._lock, self._db:
            busy = self._db.execute(
                f"SELECT 1 FROM batches WHERE input = ? AND status IN ({_OPEN})", (file_id,)
            ).fetchone()
            if busy or file is None:
                return not busy
            self._db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
        with contextlib.suppress(FileNotFoundError):
            file.path.unlink()
        return True

    # ---- batches --------------------------------------------------------------------------------

    def add_batch(self, tenant: str, doc: dict[str, Any]) -> StoredBatch:
        """Record a new batch."""
        with self._lock, self._db:
            self._db.execute(
                "INSERT INTO batches (id, tenant, status, input, doc) VALUES (?, ?, ?, ?, ?)",
                (doc["id"], tenant, doc["status"], doc["input_file_id"], json.dumps(doc)),
            )
        return StoredBatch(doc["id"], tenant, doc)

    def batch(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Return a batch, if it is the tenant's."""
        rows = self._all("SELECT * FROM batches WHERE tenant = ? AND id = ?", tenant, batch_id)
        return _batch(rows[0]) if rows else None

    def batches(self, tenant: str, *, after: str | None, limit: int) -> list[StoredBatch]:
        """Return up to ``limit`` batches, the newest first, that are older than ``after``."""
        return [_batch(row) for row in self._page("batches", tenant, after, limit)]

    def unfinished(self, tenant: str | None = None) -> list[StoredBatch]:
        """Return the batches that are not over, everybody's or a tenant's, the oldest first."""
        rows = self._all(
            f"SELECT * FROM batches WHERE status IN ({_OPEN}) AND (? IS NULL OR tenant = ?) "
            "ORDER BY seq",
            tenant,
            tenant,
        )
        return [_batch(row) for row in rows]

    def update(self, batch: StoredBatch) -> None:
        """Write the batch's ``doc`` as it is now."""
        with self._lock, self._db:
            self._write(batch)

    def finish(self, batch: StoredBatch, results: dict[str, tuple[str, Path]]) -> None:
        """Write ``doc``, and make files of its results: field of ``doc`` -> (name, path).

        All or nothing. A result of no lines is no file.
        """
        with self._lock, self._db:
            for field, (name, path) in results.items():
                if path.exists() and path.stat().st_size:
                    batch.doc[field] = self._insert_file(batch.tenant, name, "batch_output", path)
            self._write(batch)

    # ---- inside ---------------------------------------------------------------------------------

    def _insert_file(self, tenant: str, name: str, purpose: str, path: Path) -> str:
        file_id = f"file-{uuid.uuid4().hex}"
        self._db.execute(
            "INSERT INTO files (id, tenant, name, purpose, bytes, created, path) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file_id, tenant, name, purpose, path.stat().st_size, int(time.time()), str(path)),
        )
        return file_id

    def _write(self, batch: StoredBatch) -> None:
        self._db.execute(
            "UPDATE batches SET status = ?, doc = ? WHERE id = ?",
            (batch.doc["status"], json.dumps(batch.doc), batch.id),
        )

    def _page(self, table: str, tenant: str, after: str | None, limit: int) -> list[Any]:
        return self._all(
            f"SELECT * FROM {table} WHERE tenant = ? AND seq < coalesce((SELECT seq FROM {table} "
            "WHERE tenant = ? AND id = ?), 1 << 62) ORDER BY seq DESC LIMIT ?",
            tenant,
            tenant,
            after,
            limit,
        )

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def _file(row: tuple[Any, ...]) -> StoredFile:
    _, file_id, _, name, purpose, num_bytes, created, path = row
    return StoredFile(file_id, name, purpose, num_bytes, created, Path(path))


def _batch(row: tuple[Any, ...]) -> StoredBatch:
    _, batch_id, tenant, _, _, doc = row
    return StoredBatch(batch_id, tenant, json.loads(doc))
