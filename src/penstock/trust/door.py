"""Accepts connections, and hands on those whose peers authenticate themselves in time.

Until a peer is authenticated, it costs no more than a socket, `max_bytes` and `timeout_s`. At most
`max_peers` are at the door at once; others wait in the kernel's queue. One thread serves a door. No peer can
hold it up, since nothing here waits for a single peer.

    door = Door(listener, secure, begin, on_refused)   secure puts TLS on a socket, begin starts to converse
    for entered in door.serve(timeout_s):              waits at most timeout_s
        use(entered.connection, entered.conversation)  the connection does not block

The head has a door for workers (`trust.worker_door`); carriers between hosts have doors for their links.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from penstock.errors import PenstockError, ProtocolError, WaitTimeoutError
from penstock.trust.conversation import Conversation
from penstock.trust.tls import refusal

Speaker = TypeVar("Speaker", bound=Conversation)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 1.0  # without looking for peers, while this process or its host has no descriptor or memory for one
_RECEIVED = struct.Struct("=Q")
_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in the kernel's struct tcp_info


class DoorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a peer may cost before it has proved itself.

    Attributes:
        max_peers: peers at the door at once.
        max_bytes: bytes that arrive from a peer, with those of TLS.
        timeout_s: seconds in which a peer must have proved itself.
    """

    max_peers: int = 64
    max_bytes: int = 16 << 10
    timeout_s: float = 5.0


DEFAULT_LIMITS = DoorLimits()


def shown_address(address: tuple[object, ...]) -> str:
    """Return host and port of a socket's address for a message, with an IPv6 address in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


class Entered(Generic[Speaker]):
    """A connection whose peer has proved itself.

    Attributes:
        connection: the socket, which does not block; the caller closes it.
        conversation: the finished conversation with the peer.
        address: address of the peer, for messages.
    """

    def __init__(self, connection: socket.socket, conversation: Speaker, address: str) -> None:
        self.connection = connection
        self.conversation = conversation
        self.address = address


class _Visitor(Generic[Speaker]):
    """A peer at the door."""

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        deadline: float,
        begin: Callable[[socket.socket], Speaker],
    ) -> None:
        self.connection = connection
        self.address = address
        self.deadline = deadline
        self.conversations: list[Speaker] = []  # one, or none until the handshake of TLS is over
        self._begin = begin
        self._unsent = b""

    @property
    def events(self) -> int:
        """The events to wait for when a socket without TLS would block."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def advance(self, max_bytes: int) -> None:
        """Continue handshake and conversation without waiting; when this returns, both have ended well.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError: the peer has to act first.
            PenstockError: the peer is refused.
            OSError: the connection is broken.
        """
        self._require_few_bytes(max_bytes)
        if not self.conversations:
            if isinstance(self.connection, ssl.SSLSocket):
                self.connection.do_handshake()
            self.conversations.append(self._begin(self.connection))
        conversation = self.conversations[0]
        self.flush()
        while conversation.wanted:
            data = self.connection.recv(conversation.wanted)
            if data:
                conversation.receive(data)
            else:
                conversation.end_of_stream()
            self.flush()

    def flush(self) -> None:
        """Send the bytes that the conversation has to send."""
        for conversation in self.conversations:
            self._unsent += conversation.take_outgoing()
        while self._unsent:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def close(self) -> None:
        """Close the connection, after sending what the peer is told, as far as that does not wait."""
        for conversation in self.conversations:
            conversation.abandon()
        with contextlib.suppress(OSError):
            self.flush()
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()

    def _require_few_bytes(self, max_bytes: int) -> None:
        """Raise an error if too many bytes have arrived, by the kernel's count.

        Bytes cannot be counted here, since TLS keeps incomplete messages to itself.
        """
        info = self.connection.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size
        )
        if len(info) < _RECEIVED_OFFSET + _RECEIVED.size:
            return  # an old kernel without the counter; the limits of OpenSSL and the conversation still hold
        (received,) = _RECEIVED.unpack_from(info, _RECEIVED_OFFSET)
        if received > max_bytes:
            raise ProtocolError(
                f"an unauthenticated peer sent {received} bytes; the limit is {max_bytes}.",
                code="too_long",
            )


class Door(Generic[Speaker]):
    """A door, as the module describes it. Not thread-safe: one thread serves it.

    Args:
        listener: a listening socket, which is closed with the door.
        secure: puts TLS on a socket that does not block, without a handshake; or returns the socket as it is.
        begin: starts the conversation with a peer whose handshake is over; may raise PenstockError.
        on_refused: called with the address of a peer that was not let in, and with the reason.
        limits: the most that peers may cost.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        secure: Callable[[socket.socket], socket.socket],
        begin: Callable[[socket.socket], Speaker],
        on_refused: Callable[[str, PenstockError], None],
        limits: DoorLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._secure = secure
        self._begin = begin
        self._on_refused = on_refused
        self._limits = limits
        self._clock = clock
        self._visitors: set[_Visitor[Speaker]] = set()
        self._rests_until = -math.inf
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listens = False
        self._listen_while_there_is_room()

    @property
    def num_visitors(self) -> int:
        """The number of peers that are at the door."""
        return len(self._visitors)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `serve` has something to do.

        `serve` must also be called after `patience_s` seconds, such as to send away peers that are late.
        """
        return self._selector.fileno()

    def serve(self, timeout_s: float) -> list[Entered[Speaker]]:
        """Accept and advance peers; if there is nothing to do, wait for at most `timeout_s` seconds.

        Returns:
            The connections that were let in.
        """
        entered: list[Entered[Speaker]] = []
        for key, _ in self._selector.select(min(timeout_s, self.patience_s())):
            if key.data is None:
                self._accept(entered)
            else:
                self._advance(key.data, entered)
        self._dismiss_the_late()
        self._listen_while_there_is_room()
        return entered

    def close(self) -> None:
        """Close the listener, and send away all peers at the door."""
        for visitor in list(self._visitors):
            self._forget(visitor)
            visitor.close()
        self._selector.close()
        self._listener.close()

    def patience_s(self) -> float:
        """Return the seconds until the first peer is late, or a rest ends; infinite if there is neither."""
        now = self._clock()
        times = [visitor.deadline for visitor in self._visitors]
        if self._rests_until > now:
            times.append(self._rests_until)
        return max(0.0, min(times, default=math.inf) - now)

    def _accept(self, entered: list[Entered[Speaker]]) -> None:
        while self.num_visitors < self._limits.max_peers:
            try:
                accepted, address = self._listener.accept()
            except OSError as error:  # no peer waits, or it is gone already
                if error.errno in _EXHAUSTED:  # the peer goes on waiting, so the listener stays readable
                    self._rests_until = self._clock() + _REST_S
                return
            accepted.setblocking(False)
            shown = shown_address(address)
            deadline = self._clock() + self._limits.timeout_s
            try:
                connection = self._secure(accepted)
            except OSError as error:  # the peer is gone already
                accepted.close()
                self._on_refused(shown, refusal(error))
                continue
            visitor = _Visitor(connection, shown, deadline, self._begin)
            self._visitors.add(visitor)
            self._selector.register(connection, selectors.EVENT_READ, visitor)
            self._advance(visitor, entered)

    def _advance(self, visitor: _Visitor[Speaker], entered: list[Entered[Speaker]]) -> None:
        try:
            visitor.advance(self._limits.max_bytes)
        except ssl.SSLWantReadError:
            self._selector.modify(visitor.connection, selectors.EVENT_READ, visitor)
        except BlockingIOError:
            self._selector.modify(visitor.connection, visitor.events, visitor)
        except ssl.SSLWantWriteError:
            self._selector.modify(visitor.connection, selectors.EVENT_WRITE, visitor)
        except PenstockError as error:
            self._refuse(visitor, error)
        except OSError as error:
            self._refuse(visitor, refusal(error))
        except Exception as error:  # a bug that one peer has found must not end the door for all others
            self._refuse(visitor, ProtocolError(f"a peer sent invalid bytes: {type(error).__name__}."))
        else:
            self._forget(visitor)
            entered.append(Entered(visitor.connection, visitor.conversations[0], visitor.address))

    def _refuse(self, visitor: _Visitor[Speaker], error: PenstockError) -> None:
        self._forget(visitor)
        try:
            self._on_refused(visitor.address, error)  # reported before the peer can see the end
        finally:
            visitor.close()

    def _dismiss_the_late(self) -> None:
        now = self._clock()
        for visitor in [visitor for visitor in self._visitors if visitor.deadline <= now]:
            limit = f"{self._limits.timeout_s:g} s"
            self._refuse(visitor, WaitTimeoutError(f"a peer did not authenticate within {limit}."))

    def _forget(self, visitor: _Visitor[Speaker]) -> None:
        self._visitors.discard(visitor)
        self._selector.unregister(visitor.connection)

    def _listen_while_there_is_room(self) -> None:
        has_room = self.num_visitors < self._limits.max_peers and self._rests_until <= self._clock()
        if has_room and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif self._listens and not has_room:
            self._selector.unregister(self._listener)
        self._listens = has_room
