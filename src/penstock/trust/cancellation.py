"""Lets one thread stop another, which waits for the head: the head may never answer.

    the thread that waits                      another thread
    cancellation.add(socket)                   cancellation.cancel()
    socket.recv(…)  ◀── ends at once ──────────┘

Used where a worker joins (`trust.joining`), asks for a token (`trust.token_prompt`) and fetches weights
(`hosts.weights`). It does not close sockets; the code that made them does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref


class CancelledError(Exception):
    """The work was cancelled, because its result is not wanted any more."""


class Cancellation:
    """Ends a job from another thread, at once, even while the job waits at a socket. Thread-safe."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._mutex = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """End the job. May be called twice."""
        with self._mutex:
            self._is_cancelled.set()
            for each in self._sockets:
                with contextlib.suppress(OSError):  # it is closed, or was never connected
                    socket.socket.shutdown(each, socket.SHUT_RDWR)  # not TLS's own, which blocks

    def pause(self, seconds: float) -> None:
        """Wait for so many seconds; raise `CancelledError` at once when the job is cancelled."""
        self._is_cancelled.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise `CancelledError` if the job is cancelled."""
        if self.is_cancelled:
            raise CancelledError

    def add(self, each: socket.socket) -> None:
        """Let `cancel` shut this socket down; raise `CancelledError` if the job is already cancelled."""
        with self._mutex:
            self._sockets.add(each)
        self.check()


def hold_nothing(each: socket.socket) -> None:
    """Do nothing; takes the place of `Cancellation.add` for a job that is never cancelled."""
