"""The end of an HTTPS connection: a client that is slow gets what is left of its last answer.

The event loop has one time limit for the end of a connection: for the bytes that it has encrypted and that
the client has not taken, and for the client's confirmation that the connection ends. The first may take long.
Many clients never confirm. So the loop's limit is long, and here is a short one for the confirmation:

    close() ──▶ encrypted bytes wait ──▶ the client has all of them ──▶ it confirms, or 2 s have passed
                └──────────────── the loop's limit: `write_timeout_s` ───────────────┘

Used by `http_protocol`, and for `num_queued` by `api_process`. `tls_listener` sets the loop's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from typing import Any

GOODBYE_S = 2.0  # in which a client that has all bytes confirms that its connection ends
_LOOK_S = 0.25  # between two looks whether it has them


def num_queued(transport: asyncio.BaseTransport) -> int:
    """Return the bytes that the system has sent or will send and the client's host has not taken.

    There are some while the event loop has encrypted bytes, which transports do not count. Where the system
    does not say, return 0.
    """
    connection, queued = transport.get_extra_info("socket"), bytearray(4)
    if connection is not None:  # else it was lost
        with contextlib.suppress(OSError):
            fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
    return int.from_bytes(queued, sys.byteorder)


class TlsTransport:
    """The event loop's transport of an HTTPS connection, with another end: see the module's docstring."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """End the connection once the client has taken what was written, within the event loop's limit."""
        if not self._transport.is_closing():
            self._transport.close()
            self._look(self._loop.time())

    def _look(self, taken_at: float) -> None:
        """Abort the connection if the client has had all bytes for `GOODBYE_S`; else look again later.

        Args:
            taken_at: since when no look has found bytes that the client has not taken; loop time.
        """
        if self._transport.get_extra_info("socket") is None:  # the connection has ended
            return
        now = self._loop.time()
        if num_queued(self._transport):
            taken_at = now
        if now - taken_at >= GOODBYE_S:
            self._transport.abort()
        else:
            self._loop.call_later(_LOOK_S, self._look, taken_at)
