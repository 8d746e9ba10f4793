"""The socket from a client to its core, which an event loop reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.engine.ipc import ClientSocket, ClientToCore, CoreGone, CoreToClient, Hello


class CoreLink:
    """A client's connection to its core, which the event loop reads.

    Args:
        address: where the core listens.
        take: called on the event loop with each message, as soon as the message has come.
    """

    def __init__(self, address: str, take: Callable[[CoreToClient | CoreGone], None]) -> None:
        self._socket = ClientSocket(address)
        self._take = take
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that reads the socket
        self._is_read_due = False

    def open(self) -> None:
        """Let the running event loop read the socket from now on, and send the core a `Hello`."""
        self._loop = asyncio.get_running_loop()
        for fd in self._socket.filenos():
            self._loop.add_reader(fd, self.read)
        self.send(Hello())

    def reopen(self) -> None:
        """Connect anew, to the next core at the same address, and send it a `Hello`."""
        self._unwatch()
        self._socket.reconnect()
        self.open()

    def send(self, message: ClientToCore) -> None:
        """Send a message without waiting; without a core the message is lost, and `take` gets `CoreGone`."""
        self._socket.send(message)
        # The descriptor is edge-triggered, and sending may use up its edge, so that messages that have come
        # would cause no event: the socket is read once more, once for all messages that are sent now.
        if not self._is_read_due:
            self._is_read_due = True
            asyncio.get_running_loop().call_soon(self.read)

    def read(self) -> None:
        """Give `take` all messages that have come, without waiting."""
        self._is_read_due = False
        for message in self._socket.drain():
            self._take(message)

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._unwatch()
        self._socket.close()

    def _unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            for fd in self._socket.filenos():
                loop.remove_reader(fd)
