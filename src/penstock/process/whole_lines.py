"""Writes lines to a pipe so that its reader gets whole lines only, however little the pipe takes at once.

Used for the reports of a child process (`process.child`) and of a supervisor (`engine.supervisor`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from penstock.process.readiness import await_writable


class WholeLines:
    """The writing end of a pipe of lines. Never fails: the reader may be slow or gone. Any thread may write.

    Args:
        fd: stays the caller's; does not block from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # no thread writes into the line of another
        self._rest = b""  # of a line that the pipe has taken in part
        os.set_blocking(fd, False)

    def write(self, line: bytes, limit_s: float = 0.0) -> None:
        """Write a line after the rest of the last one.

        A line of which the pipe takes nothing is dropped. Of one that it takes in part, the rest goes before
        the next line.

        Args:
            limit_s: how long the call waits for the pipe to take all of the line.
        """
        deadline = time.monotonic() + limit_s
        with self._lock:
            self._rest = self._left_of(self._rest, deadline)
            if not self._rest:
                left = self._left_of(line, deadline)
                self._rest = left if len(left) < len(line) else b""

    def move_to(self, fd: int) -> None:
        """Write to another pipe from now on, beginning with a new line; `fd` stays the caller's."""
        with self._lock:
            self._rest = b""
            os.dup2(fd, self._fd, inheritable=False)
            os.set_blocking(self._fd, False)

    def _left_of(self, text: bytes, deadline: float) -> bytes:
        """Write until all is written, the reader is gone or the time is over; return what is left."""
        with contextlib.suppress(BrokenPipeError):
            while text:
                try:
                    text = text[os.write(self._fd, text) :]
                except BlockingIOError:
                    if not await_writable([self._fd], deadline - time.monotonic()):
                        break
        return text
