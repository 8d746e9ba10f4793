"""The bell that wakes a polling loop, and an object that such a loop can poll for changing connections.

The latter (`LastingSource`) keeps its descriptor when the connection that it stands for is replaced.
"""

from __future__ import annotations

import contextlib
import os
import select

from penstock.process.readiness import Waitable


class Bell:
    """A bell with which any thread wakes a thread that polls it: it is readable from `ring` to `hush`."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._event

    def ring(self) -> None:
        os.eventfd_write(self._event, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


class LastingSource:
    """An object to poll in place of a connection that may be replaced: readable when the present one is.

    Selectors know a descriptor by its number. A selector that polls a connection itself must drop the
    connection before it is closed, since its number may go to another file at once. The number of this
    object stays the same.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._present: Waitable | None = None

    def fileno(self) -> int:
        return self._epoll.fileno()

    def use(self, connection: Waitable) -> None:
        """Let this object be readable when this connection is, and no longer when the last one is."""
        self.leave()
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._present = connection

    def leave(self) -> None:
        """Use no connection, so that this object is not readable; call it before the connection is closed."""
        if self._present is not None:
            self._epoll.unregister(self._present.fileno())
        self._present = None

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        self._epoll.close()
