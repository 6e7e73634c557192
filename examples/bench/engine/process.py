"""An engine in a process of its own: started, asked, watched and ended; knows nothing of rows.

The engine's process and what it starts form one session, so that memory is counted and the end is
brought to all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


class Failed(Exception):
    """The engine said that it cannot, or ended."""


class TooSlow(Exception):
    """No answer within the limit; the engine has been ended."""


class Engine:
    """Speaks the drivers' protocol. ``log`` takes what the engine prints."""

    def __init__(self, python: str, name: str, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self.began = time.perf_counter()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [python, "-m", f"examples.bench.engine.drivers.{name}_driver"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._buffer = b""

    def ask(self, op: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer; raises Failed or TooSlow."""
        assert self._process.stdin is not None
        line = json.dumps({"op": op, **fields}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"the engine ended; see {self.log}") from None
        answer = json.loads(self._line(time.perf_counter() + limit_s, limit_s))
        if "error" in answer:
            raise Failed(answer["error"])
        return dict(answer)

    def _line(self, deadline: float, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.end(at_once=True)
                raise TooSlow(f"over {limit_s:.0f} s")
            piece = os.read(pipe, 1 << 20)
            if not piece:
                raise Failed(f"the engine ended; see {self.log}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def memory_bytes(self) -> int:
        """Memory of the engine's processes, what they share counted once (PSS)."""
        return sum(map(_pss_bytes, self._members()))

    def _members(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getsid(int(entry.name)) == self._process.pid:
                        found.append(int(entry.name))
        return found

    def end(self, at_once: bool = False) -> None:
        """End the engine and everything that it started; idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
