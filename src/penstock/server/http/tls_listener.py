"""Connections of an HTTPS server until their TLS handshake is over.

The event loop by itself calls a protocol only after the handshake, so that nothing would count connections
that never finish it. Here connections count from the first moment:

| bound | what happens |
| --- | --- |
| `max_connections`, those in their handshake included | a further connection is closed without a handshake |
| `header_timeout_s` for a handshake, as for the headers of a request | close |
| `write_timeout_s` in which a client takes what is left when its connection ends | close |
| 2 s in which a client that has all of it confirms the end (`tls_ending`) | close |

After the handshake `http_protocol` has the connection, with all of its bounds. Bytes that wait to be sent are
counted before their encryption. A client that takes less than 64 KiB in `write_timeout_s`, while more than
512 KiB wait, therefore counts as one that takes nothing. A client that speaks plain HTTP gets no answer that
it could read; the log says so. Used by `api_process`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from penstock.config.limits import ConnectionLimits
from penstock.process.listening import BACKLOG

_PAUSE_S = 0.1  # after a connection could not be accepted


class TlsListener:
    """Accepts connections and hands those whose handshake succeeds to a protocol.

    Args:
        listener: a bound socket; `open` makes it listen.
        context: certificate and rules of TLS.
        limits: bounds of connections.
        num_connections: returns the number of connections whose handshake is over.
        make_protocol: makes the protocol of one connection.
        on_plain_http: called with the address of a client that speaks HTTP without TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        limits: ConnectionLimits,
        num_connections: Callable[[], int],
        make_protocol: Callable[[], asyncio.Protocol],
        on_plain_http: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._context = context
        self._limits = limits
        self._num_connections = num_connections
        self._make_protocol = make_protocol
        self._on_plain_http = on_plain_http
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None]

    @property
    def num_handshakes(self) -> int:
        return len(self._handshakes)

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept nothing more, and end the connections in their handshake."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # the connection was reset while it waited, or no file descriptor is free
                await asyncio.sleep(_PAUSE_S)
                continue
            if self.num_handshakes + self._num_connections() >= self._limits.max_connections:
                connection.close()
                continue
            task = loop.create_task(self._shake_hands(connection, str(address[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, client: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.header_timeout_s,
                ssl_shutdown_timeout=self._limits.write_timeout_s,
            )
        except OSError as error:  # not TLS, no common version, too slow, or reset: no client could read more
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                self._on_plain_http(client)
            connection.close()
