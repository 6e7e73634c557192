"""What other threads have to say to the engine thread, in order, and its waiting for that.

Knows calls without arguments; nothing of what they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Messages for one thread, which alone waits and reads; anybody may put and close."""

    def __init__(self) -> None:
        self._messages: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False

    def put(self, message: Callable[[], None]) -> bool:
        """Have ``message`` called by the reader; False if no message is taken any more."""
        with self._wake:
            if self._closed:
                return False
            self._messages.append(message)
            self._wake.notify()
            return True

    def close(self) -> None:
        """Take no more messages; those that are there can still be read. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def wait(self, busy: Callable[[], bool]) -> bool:
        """Wait for a message, unless the reader is ``busy``; False once it is closed."""
        with self._wake:
            while not self._messages and not busy() and not self._closed:
                self._wake.wait()
            return not self._closed

    def read(self) -> None:
        """Call all that was put, and is put meanwhile, in order."""
        while self._messages:
            self._messages.popleft()()
