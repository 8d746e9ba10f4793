"""The sources of news whose descriptors stay the same: a bell, and a connection that may be replaced."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Protocol


class Bell:
    """A source that is readable while it rings. Any thread may ring it."""

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


class Connection(Protocol):
    """A connection that a `LastingSource` stands for, one at a time."""

    def fileno(self) -> int: ...


class LastingSource:
    """A source that is readable when the present connection is, however often that is replaced.

    Selectors hold a descriptor by its number. A waiter at a connection itself must leave it before it is
    closed: the freed number may be given to another file at once. At this source all may wait for ever.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._present: Connection | None = None

    def fileno(self) -> int:
        return self._epoll.fileno()

    def use(self, connection: Connection) -> None:
        """Use this connection from now on."""
        self.leave()
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._present = connection

    def leave(self) -> None:
        """Use no connection; to be called before the present one is closed."""
        if self._present is not None:
            self._epoll.unregister(self._present.fileno())
        self._present = None

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        self._epoll.close()
