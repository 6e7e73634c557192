"""Work in a few threads, a fair turn for each tenant.

Knows tenants, keys and threads; of the work only its name, to say when no more of it may wait. A
tenant's work waits in a line of its own and the lines are served in turn, one piece each, so that
who asks for much waits for it alone. No tenant has all threads at once: work that lasts seconds
cannot keep the others from beginning.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from radixkv.errors import Overloaded

T = TypeVar("T")
NUM_THREADS = 3
MAX_RUNNING_OF_TENANT = 2
MAX_WAITING_OF_TENANT = 16


class _Job(Generic[T]):
    """A piece of work, and those who wait for it."""

    __slots__ = ("key", "running", "tenant", "waiters", "work")

    def __init__(self, tenant: str, key: Hashable, work: Callable[[], T]) -> None:
        self.tenant = tenant
        self.key = key
        self.work = work
        self.running = False
        self.waiters: list[Future[T]] = []


class TenantTurns(Generic[T]):
    """A queue of work for all tenants. Any thread may ask."""

    def __init__(self, thread_name: str) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, Hashable], _Job[T]] = {}
        self._lines: OrderedDict[str, deque[_Job[T]]] = OrderedDict()  # who is next comes first
        self._running_of: Counter[str] = Counter()
        self._num_threads = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=thread_name)

    def submit(self, tenant: str, key: Hashable, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` done and return what has its result, or its error, then.

        All of a tenant who ask for the same ``key`` at once wait for one piece of work. Work that
        has not begun and for which nobody waits any more (``cancel()``) is not done. Raises
        Overloaded if as much of the tenant's work waits as may.
        """
        waiter: Future[T] = Future()
        with self._lock:
            job = self._jobs.get((tenant, key))
            if job is None:
                line = self._lines.setdefault(tenant, deque())
                if len(line) >= MAX_WAITING_OF_TENANT:
                    raise Overloaded(
                        f"{len(line)} grammars of yours wait to be compiled, and no more may: "
                        "try again later",
                        retry_after_s=5,
                    )
                job = self._jobs[tenant, key] = _Job(tenant, key, work)
                line.append(job)
            job.waiters.append(waiter)
            begin = self._take()
        waiter.add_done_callback(lambda _: self._left(job, waiter))
        if begin is not None:
            self._threads.submit(self._run, begin)
        return waiter

    def num_waiting(self, tenant: str) -> int:
        """How many pieces of work of ``tenant`` have not begun."""
        with self._lock:
            return len(self._lines.get(tenant, ()))

    def _take(self) -> _Job[T] | None:
        """Return what may begin now, if a thread is free for it. Under the lock."""
        if self._num_threads == NUM_THREADS:
            return None
        # One tenant at most is passed over: two that have all that they may would be all threads.
        for tenant, line in self._lines.items():
            if self._running_of[tenant] < MAX_RUNNING_OF_TENANT:
                job = line.popleft()
                if line:
                    self._lines.move_to_end(tenant)
                else:
                    del self._lines[tenant]
                job.running = True
                self._running_of[tenant] += 1
                self._num_threads += 1
                return job
        return None

    def _run(self, begin: _Job[T]) -> None:
        job: _Job[T] | None = begin
        while job is not None:
            outcome: Future[T] = Future()
            try:
                outcome.set_result(job.work())
            except BaseException as error:  # whoever waits must be told, whatever it is
                outcome.set_exception(error)
            with self._lock:
                del self._jobs[job.tenant, job.key]
                self._running_of -= Counter((job.tenant,))  # forgets who has none
                self._num_threads -= 1
                done, job = job.waiters, self._take()
            for waiter in done:
                if not waiter.set_running_or_notify_cancel():
                    continue
                failure = outcome.exception()
                if failure is None:
                    waiter.set_result(outcome.result())
                else:
                    waiter.set_exception(failure)

    def _left(self, job: _Job[T], waiter: Future[T]) -> None:
        """``waiter`` waits no more: drop what nobody else waits for."""
        with self._lock:
            if job.running:
                return
            job.waiters.remove(waiter)
            if not job.waiters:
                del self._jobs[job.tenant, job.key]
                line = self._lines[job.tenant]
                line.remove(job)
                if not line:
                    del self._lines[job.tenant]
