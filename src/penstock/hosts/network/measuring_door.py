"""The listener at which another host of the cluster measures the network paths to this host, in a thread.

It listens at a link port of every address that is to be measured. A peer proves by TLS that it is the
expected host (`trust.door`), and `link_measuring.answer_measuring` then answers it. The connections carry
nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from penstock.bounds import Port
from penstock.errors import PenstockError, ProtocolError
from penstock.hosts.bell import Bell
from penstock.hosts.network.interfaces import HostAddress
from penstock.hosts.network.link_measuring import answer_measuring
from penstock.process.link_ports import PortRange, listen_in_range
from penstock.process.readiness import Waitable, await_readable
from penstock.trust.credentials import Credentials
from penstock.trust.door import Door, DoorLimits
from penstock.trust.peer_names import PeerName
from penstock.trust.tls import CertifiedPeer, link_server_context, under_tls

SURVEY_S = 15.0  # so long another host may measure the paths; it dials them all at the beginning
_LOOK_S = 0.5  # between two looks at whether a peer at a door is late


class ListeningPlace(msgspec.Struct, frozen=True):
    """An address and port at which a host listens to be measured."""

    address: HostAddress
    port: Port


class MeasuringDoor:
    """A listener, with its thread, that answers one other host which measures the paths to it.

    Args:
        addresses: addresses of this host; those at which nothing can listen are left out.
        ports: range of the host's link ports, from which free ones are taken.
        credentials: credentials of the head or agent on this host.
        peer: name of the peer that is expected.
        clock: monotonic seconds.

    Attributes:
        places: where it listens.

    Raises:
        UsageError, PortInUseError: nothing can listen at any of the addresses.
    """

    def __init__(
        self,
        addresses: Sequence[HostAddress],
        ports: PortRange,
        credentials: Credentials,
        peer: PeerName,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places: list[ListeningPlace] = []
        self._context = link_server_context(credentials)
        self._peer = peer
        self._clock = clock
        self._doors = [self._open(listener) for listener in self._listeners(addresses, ports)]
        self._bell = Bell()
        self._thread = threading.Thread(target=self._serve, name="measuring door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, after an answer that is being given has ended; that takes some seconds at most."""
        self._bell.ring()
        self._thread.join()
        for door in self._doors:
            door.close()
        self._bell.close()

    def _listeners(self, addresses: Sequence[HostAddress], ports: PortRange) -> list[socket.socket]:
        listeners: list[socket.socket] = []
        failure: PenstockError | None = None
        for address in addresses:
            try:
                listener = listen_in_range(address.bind_address, ports)
            except PenstockError as error:  # such as for an address that has gone, or if all ports are taken
                failure = failure or error
                continue
            listeners.append(listener)
            self.places.append(ListeningPlace(address, listener.getsockname()[1]))
        if failure is not None and not listeners:
            raise failure
        return listeners

    def _open(self, listener: socket.socket) -> Door[CertifiedPeer]:
        limits = DoorLimits(timeout_s=SURVEY_S)
        return Door(listener, self._secure, self._begin, lambda address, error: None, limits, self._clock)

    def _secure(self, accepted: socket.socket) -> socket.socket:
        with contextlib.suppress(OSError):  # it is gone already, as the handshake will show
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return under_tls(self._context, accepted, is_server=True)

    def _begin(self, connection: socket.socket) -> CertifiedPeer:
        if not isinstance(connection, ssl.SSLSocket):  # `_secure` makes no other
            raise ProtocolError("a host connected for measuring without TLS.", code="not_tls")
        return CertifiedPeer(connection, [self._peer])

    def _serve(self) -> None:
        while True:
            sources: list[Waitable] = [self._bell, *self._doors]
            ready = await_readable(sources, _LOOK_S)
            if self._bell in ready:
                return
            for door in self._doors:
                for entered in door.serve(0.0):
                    with entered.connection as stream, contextlib.suppress(PenstockError, OSError):
                        answer_measuring(stream)
