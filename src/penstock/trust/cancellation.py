"""Ends, from another thread, a thread's work for a head that may never answer.

    one thread                                 another one
    cancellation.add(socket)                   cancellation.cancel()
    socket.recv(…)  ◀── ends at once ──────────┘

Used where a worker joins (`trust.joining`), is given a token (`trust.token_prompt`) and fetches weights
(`hosts.weights`). Does not close sockets: their makers do.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref


class CancelledError(Exception):
    """The result is not wanted any more."""


class Cancellation:
    """Ends a job from another thread: at once, also where it waits at a socket. Thread-safe."""

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
                    socket.socket.shutdown(each, socket.SHUT_RDWR)  # without a word of TLS, which blocks

    def pause(self, seconds: float) -> None:
        """Wait; raises `CancelledError` at once when the job is cancelled."""
        self._is_cancelled.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise `CancelledError` if the job is cancelled."""
        if self.is_cancelled:
            raise CancelledError

    def add(self, each: socket.socket) -> None:
        """Shut this socket down when the job is cancelled; raises `CancelledError` if it already is."""
        with self._mutex:
            self._sockets.add(each)
        self.check()


def hold_nothing(each: socket.socket) -> None:
    """Do nothing; used for `Cancellation.add` where the job is never cancelled."""
