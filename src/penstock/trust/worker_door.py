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
    credentials = identity.head_credentials(head_host)
    context = join_server_context(credentials)
    desk = HeadDesk(
        identity=identity,
        book=book,
        connected=connected,
        certificate=own_certificate_der(credentials),
        version=version,
    )

    def secure(accepted: socket.socket) -> socket.socket:
        return under_tls(context, accepted, is_server=True)

    def begin(connection: socket.socket) -> HeadConversation:
        if not isinstance(connection, ssl.SSLSocket):  # `secure` makes no other
            raise ProtocolError("a worker connected without TLS.", code="not_tls")
        if connection.selected_alpn_protocol() == WEIGHTS_PROTOCOL:
            return WeightsVisit(desk, peer_certificate(connection))
        return HeadJoin(desk, peer_certificate(connection))

    return Door(listener, secure, begin, on_refused, limits, clock)
