"""The head's door for workers: those with a token get a certificate, those with a certificate are let in.

door = worker_door(listener, identity, book, connected, head_host, version, on_refused)
for entered in door.serve(timeout_s):
    if entered.conversation.is_connected:     the agent of `conversation.host`, over mutual TLS 1.3
        ...
    elif isinstance(entered.conversation, WeightsVisit):     a connection to fetch weights
        ...
    elif entered.conversation.visitor != NOBODY:             a host that only looks whether it could join
        ...
    else:                                     the worker has got a certificate, and connects again with it
        entered.connection.close()
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from penstock.errors import PenstockError, ProtocolError
from penstock.trust.admission import AdmissionBook
from penstock.trust.door import DEFAULT_LIMITS, Door, DoorLimits
from penstock.trust.head_join import ConnectedHosts, HeadConversation, HeadDesk, HeadJoin, WeightsVisit
from penstock.trust.identity import ClusterIdentity
from penstock.trust.tls import (
    WEIGHTS_PROTOCOL,
    join_server_context,
    own_certificate_der,
    peer_certificate,
    under_tls,
)


class _Desks:
    """The head's desk for conversations at its door; it changes when the certificate of the head is renewed.

    A peer may have been shown the certificate of before, and a proof of a token holds for one certificate.

    Args:
        identity: has the head's certificate of now.
        head_host: name of the head's own host.
        make: makes the desk of a certificate (DER).
    """

    def __init__(self, identity: ClusterIdentity, head_host: str, make: Callable[[bytes], HeadDesk]) -> None:
        self._identity = identity
        self._head_host = head_host
        self._make = make
        self._credentials = identity.head_credentials(head_host)
        self._context = join_server_context(self._credentials)
        self._by_context: WeakKeyDictionary[ssl.SSLContext, HeadDesk] = WeakKeyDictionary()
        self._by_context[self._context] = make(own_certificate_der(self._credentials))

    def context(self) -> ssl.SSLContext:
        """Return the context for the next peer, with the head's certificate of now.

        Raises:
            OSError: there is no descriptor or memory for a new context.
        """
        credentials = self._identity.head_credentials(self._head_host)
        if credentials is not self._credentials:
            context = join_server_context(credentials)
            self._by_context[context] = self._make(own_certificate_der(credentials))
            self._credentials, self._context = credentials, context
        return self._context

    def of(self, connection: ssl.SSLSocket) -> HeadDesk:
        """Return the desk with the certificate that the peer at this connection was shown."""
        return self._by_context[connection.context]


def worker_door(
    listener: socket.socket,
    identity: ClusterIdentity,
    book: AdmissionBook,
    connected: ConnectedHosts,
    head_host: str,
    version: str,
    on_refused: Callable[[str, PenstockError], None],
    limits: DoorLimits = DEFAULT_LIMITS,
    clock: Callable[[], float] = time.monotonic,
) -> Door[HeadConversation]:
    """Open the door for workers.

    Args:
        listener: a listening socket, which the door closes.
        identity: the authority of the cluster.
        book: tokens and accepted certificates.
        connected: names of hosts that are in use.
        head_host: name of the head's own host.
        version: version of Penstock.
        on_refused: called with the address of a peer that was not let in, and with the reason.
        limits: the most that peers may cost.
        clock: monotonic seconds.

    Raises:
        UsageError: the library is missing, or the name cannot stand in a certificate.
    """

    def make_desk(certificate: bytes) -> HeadDesk:
        return HeadDesk(
            identity=identity, book=book, connected=connected, certificate=certificate, version=version
        )

    desks = _Desks(identity, head_host, make_desk)

    def secure(accepted: socket.socket) -> socket.socket:
        return under_tls(desks.context(), accepted, is_server=True)

    def begin(connection: socket.socket) -> HeadConversation:
        if not isinstance(connection, ssl.SSLSocket):  # `secure` makes no other
            raise ProtocolError("a worker connected without TLS.", code="not_tls")
        desk = desks.of(connection)
        if connection.selected_alpn_protocol() == WEIGHTS_PROTOCOL:
            return WeightsVisit(desk, peer_certificate(connection))
        return HeadJoin(desk, peer_certificate(connection))

    return Door(listener, secure, begin, on_refused, limits, clock)
