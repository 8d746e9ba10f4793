"""Carries messages between the head and an agent, both ways, without ever waiting.

A message is its length in four bytes, and then JSON. Bytes that the other side does not take at once are kept
here, and sent with the next call: heartbeats show whether the other side is gone, and not full buffers of the
kernel. A call reads a bounded number of bytes, and a message has a bounded length. A peer that sends without
end therefore neither holds up the receiver nor fills its memory.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from penstock.config.hosts import SAME_VERSION
from penstock.errors import LinkClosedError, PeerError, ProtocolError
from penstock.told_text import shown_line

MAX_MESSAGE_BYTES = 64 << 20  # far above a config with the digests of a large stage
MAX_TOLD_BYTES = 4 << 20  # for a message to the head: far above what a host prints in a second
MAX_HELLO_BYTES = 64 << 10  # for the first message of an agent, and for each message of a visit
RECEIVE_BYTES = 1 << 20  # about so many bytes are read in one call of `receive`
_HEAD_BYTES = 4
_READ_BYTES = 1 << 16

Incoming = TypeVar("Incoming")


class AgentWire(Generic[Incoming]):
    """One end of a connection that carries messages between the head and an agent. It never waits.

    Args:
        connection: connected socket whose peer has proved itself (`trust`). The wire closes it.
        incoming: type of the messages that arrive; anything else ends the connection.
        max_bytes: the most bytes of one message that arrives; a longer one ends the connection.

    Attributes:
        failure: the error that ended the connection; None: the connection is not broken.
        max_bytes: as given; the owner may raise it once the other side has identified itself.
    """

    def __init__(self, connection: socket.socket, incoming: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.failure: PeerError | None = None
        self.max_bytes = max_bytes
        self._connection = connection
        self._connection.setblocking(False)
        self._decoder: msgspec.json.Decoder[Incoming] = msgspec.json.Decoder(incoming)
        self._encoder = msgspec.json.Encoder()
        self._arrived = bytearray()
        self._unsent = bytearray()
        self._is_held = False

    def fileno(self) -> int:
        """Return the socket's descriptor: readable when data came or the peer closed; -1 after `close`."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message, and send what the connection takes without waiting. Never fails.

        In a `together` block it is sent at the end of the block. Once `failure` is set it is dropped.
        """
        if self.failure is not None:
            return  # nothing is kept for a host that may be away for days
        encoded = self._encoder.encode(message)
        assert len(encoded) <= MAX_MESSAGE_BYTES, f"{type(message).__name__}: {len(encoded)} bytes"
        self._unsent += len(encoded).to_bytes(_HEAD_BYTES, "big") + encoded
        if not self._is_held:
            self.flush()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold back messages that are sent in the `with` block, and send them all at its end. May be nested.

        A record of TLS or a packet costs both sides more than the messages in it.
        """
        was_held, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = was_held
            if not was_held:
                self.flush()

    def flush(self) -> bool:
        """Send as much of the queue as the connection takes now; return whether the queue is empty."""
        while self._unsent and self.failure is None:
            try:
                num_sent = self._connection.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError as error:
                self._fail(LinkClosedError(f"the connection is broken: {error.strerror or error}."))
            else:
                del self._unsent[:num_sent]
        return not self._unsent

    def receive(self) -> list[Incoming]:
        """Return the messages that have arrived, without waiting; also send what is queued.

        A call reads about `RECEIVE_BYTES`. If there is more, the descriptor stays readable. Once the
        connection has ended, `failure` says why.
        """
        self.flush()
        messages: list[Incoming] = []
        num_read = 0
        while self.failure is None and (num_read < RECEIVE_BYTES or self._is_kept_by_tls()):
            try:
                data = self._connection.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                self._fail(LinkClosedError(f"the connection is broken: {error.strerror or error}."))
                break
            if not data:
                self._fail(LinkClosedError("the other side has closed the connection."))
            num_read += len(data)
            self._arrived += data
            messages += self._take_messages()
        return messages

    def give_up(self, why: str) -> None:
        """Give up the connection: set `failure`, with the text `why`, unless it is set already."""
        self._fail(LinkClosedError(why))

    def hang_up(self) -> None:
        """Shut the connection down, so that the other side notices; the descriptor stays until `close`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if self.failure is None:
            self.failure = LinkClosedError("the connection was closed here.")
        self._connection.close()

    def _is_kept_by_tls(self) -> bool:
        """Return whether TLS keeps bytes of a record that were not read yet.

        The socket is not readable because of them, so `receive` must not leave them.
        """
        return isinstance(self._connection, ssl.SSLSocket) and self._connection.pending() > 0

    def _take_messages(self) -> list[Incoming]:
        messages: list[Incoming] = []
        place = 0
        while len(self._arrived) - place >= _HEAD_BYTES:
            size = int.from_bytes(self._arrived[place : place + _HEAD_BYTES], "big")
            end = place + _HEAD_BYTES + size
            if size > self.max_bytes:
                self._refuse(f"a message of {size} bytes, more than {self.max_bytes}")
                break
            if len(self._arrived) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._arrived)[place + _HEAD_BYTES : end]))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._refuse(f"a message that cannot be read: {shown_line(str(error))}")
                break
            place = end
        del self._arrived[:place]
        return messages

    def _refuse(self, what: str) -> None:
        self._arrived.clear()
        self._fail(
            ProtocolError(
                f"the other side sent {what}.",
                remedy=SAME_VERSION,
            )
        )

    def _fail(self, error: PeerError) -> None:
        if self.failure is None:
            self.failure = error
