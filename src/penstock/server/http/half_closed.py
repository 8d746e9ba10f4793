"""Connections whose client has closed its sending side, and may still wait for the answers that are due.

A client that has only said all it wants to say and one that has left look alike: both have sent an end. They
differ when something is written, since the host of the one that has left resets the connection. So something
is written at once: an interim answer, or, in an answer that has begun, what its route writes by `PROBE_KEY`.
The connection is looked at until its last answer is out. Used by `http_protocol`.
"""

from __future__ import annotations

import asyncio
import socket

PROBE_KEY = "penstock.probe"  # in the scope of a request: writes what means nothing into its stream
# Every client of HTTP/1.1 passes over it (RFC 9110, section 15.2); not all pass over the other interim ones.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.5  # times between two looks double


class ResetWatch:
    """Aborts a connection that the event loop has stopped reading, once its client's host has reset it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Look after the connection until it ends or `end` is called."""
        self._look_in(transport, _FIRST_LOOK_S)

    def end(self) -> None:
        """Look no more. Harmless where nothing was begun."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, transport: asyncio.Transport, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look, transport, seconds)

    def _look(self, transport: asyncio.Transport, seconds: float) -> None:
        """The event loop does not report a reset to a connection that it has stopped reading."""
        if transport.is_closing():
            return
        if _is_reset(transport):
            transport.abort()
        else:
            self._look_in(transport, min(2 * seconds, _LAST_LOOK_S))


def _is_reset(transport: asyncio.Transport) -> bool:
    connection = transport.get_extra_info("socket")
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
