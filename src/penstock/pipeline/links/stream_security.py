"""Secures a connected socket before a link or channel uses it: by TLS, by a challenge, or by nothing.

To add a way of making streams safe, implement `Proof` and add a line to `_KINDS`. `trust` decides what is
proved, and by which messages; this module exchanges these messages over sockets that do not block. Used by
`pipeline.links.stream_opening`. No torch here.

An end of a stream that only writes need not read after the TLS handshake. All that TLS could still send to it
is a close or an alert, and neither needs an answer. (The server gives out no session tickets.)
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.errors import CertificateError, ProtocolError
from penstock.pipeline.links.stream import watch_path
from penstock.process.endpoints import (
    Certified,
    Challenged,
    PlainText,
    StreamSecurity,
    StreamSide,
    opener_of,
)
from penstock.trust.challenge import AcceptedChallenge, DialledChallenge
from penstock.trust.conversation import Conversation, Welcomed, Welcoming
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName
from penstock.trust.tls import (
    CertifiedDialler,
    CertifiedPeer,
    link_client_context,
    link_server_context,
    refusal,
    under_tls,
)

# Waits until a descriptor has one of the given events of poll(2). Raises at its deadline, or when the stream
# is ended meanwhile, by this process or because its epoch is over (`Interruption`).
Wait = Callable[[int, int], None]
Answer = TypeVar("Answer")


class Proof(Protocol):
    """The way in which the two ends of a stream prove their identities to each other; an interface."""

    def wrap(self, connected: socket.socket) -> socket.socket:
        """Return the stream over a socket, which belongs to the stream from now on.

        If the proof uses TLS, the stream is wrapped by `ssl`, and its handshake is still to come.
        """
        ...

    def begin(self, stream: socket.socket) -> Conversation:
        """Return the conversation (the exchange of proofs) to be held over the stream.

        It is held after the TLS handshake, if there is one.

        Raises:
            PeerError: the other end is not the one that is expected.
        """
        ...


def proof_of(security: StreamSecurity, side: StreamSide) -> Proof:
    """Return the proof for streams of this kind of security.

    Args:
        security: the kind, with its credentials; their descriptors are read now, and stay the caller's.
        side: whether this end dials or accepts.

    Raises:
        ProtocolError, CertificateError: this build does not know the kind, or its credentials or names cannot
            be used.
    """
    return opener_of(_KINDS, security, "a stream between hosts")(security, side)


def secured(connected: socket.socket, proof: Proof, wait: Wait) -> socket.socket:
    """Return the stream over a socket once the proof is complete (`ProvedByNothing` has nothing to prove).

    Args:
        connected: belongs to the stream from now on, which does not block; it is closed if this raises.
        wait: waits for events of a descriptor (`Wait`).

    Raises:
        PeerError, OSError: the other end is not the one that is expected, or speaks something else.
    """
    connected.setblocking(False)
    stream = connected
    try:
        watch_path(connected)
        stream = proof.wrap(connected)
        if isinstance(stream, ssl.SSLSocket):
            _when_ready(stream.do_handshake, stream, wait)
        _converse(proof.begin(stream), stream, wait)
    except BaseException:
        stream.close()
        raise
    return stream


class ProvedByNothing:
    """A `Proof` for plain text that proves nothing: it accepts any peer."""

    def __init__(self, security: PlainText, side: StreamSide) -> None:
        self._begin = Welcoming if side == "accepter" else Welcomed

    def wrap(self, connected: socket.socket) -> socket.socket:
        return connected

    def begin(self, stream: socket.socket) -> Conversation:
        return self._begin()


class ProvedByCertificates:
    """A `Proof` by TLS, in which both ends show certificates of their cluster."""

    def __init__(self, security: Certified, side: StreamSide) -> None:
        self._is_server = side == "accepter"
        make = link_server_context if self._is_server else link_client_context
        self._context = make(_credentials(security.credentials_fd))
        self._peer = _name(security.peer)

    def wrap(self, connected: socket.socket) -> socket.socket:
        return under_tls(self._context, connected, is_server=self._is_server)

    def begin(self, stream: socket.socket) -> Conversation:
        assert isinstance(stream, ssl.SSLSocket), stream
        return (CertifiedPeer if self._is_server else CertifiedDialler)(stream, [self._peer])


class ProvedByChallenge:
    """A `Proof` for plain text, by a challenge: both ends show that they have the secret key of the epoch."""

    def __init__(self, security: Challenged, side: StreamSide) -> None:
        self._is_accepter = side == "accepter"
        self._key = _credentials(security.credentials_fd).epoch_key
        self._own, self._peer = _name(security.own), _name(security.peer)
        if not self._key:
            raise CertificateError(
                "the credentials for a link in plain text lack the key of the epoch.",
                remedy="Give --insecure-links on all hosts, or on none.",
            )

    def wrap(self, connected: socket.socket) -> socket.socket:
        return connected

    def begin(self, stream: socket.socket) -> Conversation:
        if self._is_accepter:
            return AcceptedChallenge(self._key, self._own, [self._peer])
        return DialledChallenge(self._key, self._own, self._peer)


_KINDS: Mapping[type, Callable[[Any, StreamSide], Proof]] = {
    PlainText: ProvedByNothing,
    Certified: ProvedByCertificates,
    Challenged: ProvedByChallenge,
}


def _converse(conversation: Conversation, stream: socket.socket, wait: Wait) -> None:
    """Exchange messages until the conversation is over; never read a byte beyond, which is the link's."""
    _say(conversation, stream, wait)
    while conversation.wanted:
        data = _when_ready(lambda: stream.recv(conversation.wanted), stream, wait)
        if data:
            conversation.receive(data)
        else:
            conversation.end_of_stream()
        _say(conversation, stream, wait)


def _say(conversation: Conversation, stream: socket.socket, wait: Wait) -> None:
    unsent = conversation.take_outgoing()
    while unsent:
        num_sent = _when_ready(partial(stream.send, unsent), stream, wait, select.POLLOUT)
        unsent = unsent[num_sent:]


def _when_ready(
    call: Callable[[], Answer], stream: socket.socket, wait: Wait, events: int = select.POLLIN
) -> Answer:
    """Repeat `call` until it succeeds, and wait for the socket in between.

    Args:
        events: what a plain socket must be ready for; a TLS socket says that itself.
    """
    while True:
        try:
            return call()
        except BlockingIOError:
            wanted = events
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        except ssl.SSLError as error:
            raise refusal(error) from error
        wait(stream.fileno(), wanted)


def _credentials(fd: int) -> Credentials:
    """Return the credentials behind a descriptor, which stays the caller's."""
    return Credentials.from_memory(os.dup(fd))


def _name(uri: str) -> PeerName:
    try:
        return PeerName.parse(uri)
    except ValueError as error:
        raise ProtocolError(f"{uri!r} is {error}.", remedy="Run the same Penstock on all hosts.") from error
