"""Handles connections whose client sends nothing more, but may still wait for answers.

The client may wait, or may have left: in both cases it has closed its sending side. The difference shows when
something is written, since the host of a client that has left resets the connection. So something is written
at once: an interim answer or, if an answer has begun, what the function at `PROBE_KEY` writes. From then on
the connection is checked for a reset until its last answer is sent. Used by `http_protocol`.
"""

from __future__ import annotations

import asyncio
import socket

PROBE_KEY = "penstock.probe"  # in a request's ASGI scope: a function that writes a ping into its stream
# Every client of HTTP/1.1 ignores this interim answer (RFC 9110, section 15.2); some stumble over others.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.5  # the time between two looks doubles from the first to the last


class ResetWatch:
    """Aborts a connection that the event loop has stopped reading, once its client's host has reset it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Check the connection again and again, until it ends or `end` is called."""
        self._look_in(transport, _FIRST_LOOK_S)

    def end(self) -> None:
        """Check no more. Harmless without a `begin`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, transport: asyncio.Transport, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look, transport, seconds)

    def _look(self, transport: asyncio.Transport, seconds: float) -> None:
        """Abort the connection if it was reset: the event loop has stopped reading, and does not notice."""
        if transport.is_closing():
            return
        if _is_reset(transport):
            transport.abort()
        else:
            self._look_in(transport, min(2 * seconds, _LAST_LOOK_S))


def _is_reset(transport: asyncio.Transport) -> bool:
    connection = transport.get_extra_info("socket")
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
