"""Finds out which ways (network paths) lead from one host to another, and how fast they are.

The scout of one host listens (`measuring_door`). The scout of the other host dials all places that it is
given, at once, and then measures one way after the other. The head decides which pairs of hosts are scouted
(`path_finding`). On a worker, the agent runs the scout (`scouting_agent`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from penstock.bounds import Port, Word
from penstock.errors import LinkClosedError, PenstockError, ProtocolError, WaitTimeoutError
from penstock.hosts.network.dialling import CONNECT_S, Dial, close_all, dial_all, reason
from penstock.hosts.network.interfaces import AddressPair, HostAddress, path_mtu
from penstock.hosts.network.link_choice import MeasuredPair
from penstock.hosts.network.link_measuring import measure_stream
from penstock.hosts.network.measuring_door import ListeningPlace, MeasuringDoor
from penstock.process.link_ports import PortRange
from penstock.trust.credentials import Credentials
from penstock.trust.joining import converse
from penstock.trust.peer_names import PeerName
from penstock.trust.tls import CertifiedDialler, link_client_context, refusal, under_tls

MEET_S = 2.0  # for a handshake: enough for any way that carries anything
MOST_PLACES = 256  # the most places at which a host listens, the most promising first
_MOST_FOUND = 64  # the most ways in a survey: far more than are tried between two hosts


class Target(msgspec.Struct, frozen=True):
    """A pair of addresses, and the port to dial; `own` in the pair is an address of the dialling host."""

    pair: AddressPair
    port: Port


class WayToTry(msgspec.Struct, frozen=True, kw_only=True):
    """A network path between an interface of the dialling host and one of another host.

    Attributes:
        targets: pairs of addresses on this path, the most promising first; one that connects is enough.
        seconds: how long it is measured; 0: it is only tried whether the path leads there.
    """

    targets: list[Target]
    seconds: float


class Dead(msgspec.Struct, frozen=True):
    """A pair of addresses between which no connection came about, and why."""

    pair: AddressPair
    why: str


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a host about the network paths to another one; `own` in a pair is its own address.

    Attributes:
        open: for each path that leads there, what was measured.
        dead: for each path that does not, the reason.
    """

    open: Annotated[list[MeasuredPair], msgspec.Meta(max_length=_MOST_FOUND)]
    dead: Annotated[list[Dead], msgspec.Meta(max_length=_MOST_FOUND)]


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The places at which a host listens to be measured.

    Attributes:
        places: the addresses and ports.
        only: the address that the host's user has fixed for links; empty: none is fixed.
    """

    places: Annotated[list[ListeningPlace], msgspec.Meta(max_length=MOST_PLACES)]
    only: Word = ""


class Scout(Protocol):
    """The interface by which the head has a host listen, or measure, to find network paths to another."""

    @property
    def peer(self) -> PeerName:
        """The name under which this host proves its identity to the others."""
        ...

    def listen(self, peer: PeerName) -> Listening:
        """Begin to listen, so that the host `peer` can measure the network paths to this one, until `rest`.

        Raises:
            PenstockError: no port is free, or the host is gone.
        """
        ...

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        """Dial the host `peer`, which must listen, on all network paths, and measure those that lead there.

        Raises:
            PenstockError: the host that should measure is gone.
        """
        ...

    def rest(self) -> None:
        """Stop listening for the host that measures."""
        ...


class OwnScout:
    """The scout of this host. Implements `Scout`; a call may take seconds.

    Args:
        peer: the name of this process, as other hosts expect it.
        credentials: returns credentials with that name, which are renewed before they expire.
        ports: range of the host's link ports.
        addresses: returns the addresses of this host that the host of a given name may reach.
        only: the address that the user has fixed for links; empty: none.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        peer: PeerName,
        credentials: Callable[[], Credentials],
        ports: PortRange,
        addresses: Callable[[str], Sequence[HostAddress]],
        only: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._peer = peer
        self._credentials = credentials
        self._ports = ports
        self._addresses = addresses
        self._only = only
        self._clock = clock
        self._wall_clock = wall_clock
        self._doors: list[MeasuringDoor] = []

    @property
    def peer(self) -> PeerName:
        return self._peer

    def listen(self, peer: PeerName) -> Listening:
        self.rest()
        self._require_own_cluster(peer)
        door = MeasuringDoor(self._places(peer.host), self._ports, self._credentials(), peer, self._clock)
        self._doors.append(door)
        return Listening(places=door.places, only=self._only)

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        self._require_own_cluster(peer)
        targets = [target for way in ways for target in way.targets]
        ends = iter(dial_all([_dial(target) for target in targets], CONNECT_S, self._clock))
        dialled = [[next(ends) for _ in way.targets] for way in ways]
        found = Survey(open=[], dead=[])
        try:
            for way, of_way in zip(ways, dialled, strict=True):
                self._try_way(peer, way, of_way, found)
        finally:
            for of_way in dialled:
                close_all(of_way)
        return found

    def rest(self) -> None:
        while self._doors:
            self._doors.pop().close()

    def _places(self, peer: str) -> list[HostAddress]:
        """Return the addresses at which to listen.

        Of the interface that has the fixed address, it is only that address.
        """
        addresses = self._addresses(peer)
        fixed = {one.interface for one in addresses if one.address == self._only}
        places = [one for one in addresses if one.interface not in fixed or one.address == self._only]
        return places[:MOST_PLACES]

    def _try_way(
        self, peer: PeerName, way: WayToTry, ends: Sequence[socket.socket | OSError], found: Survey
    ) -> None:
        """Add the result for one way to `found`: the first target that can be measured, or why none can."""
        dead: list[Dead] = []
        for target, end in zip(way.targets, ends, strict=True):
            if isinstance(end, OSError):
                dead.append(Dead(target.pair, reason(end)))
                continue
            try:
                found.open.append(self._measured(target, end, peer, way.seconds))
                return
            except PenstockError as error:
                dead.append(Dead(target.pair, error.message.rstrip(".")))
                if isinstance(error, WaitTimeoutError):  # the other addresses lead over the same wire
                    break
        found.dead.extend(dead[:1])

    def _measured(self, target: Target, end: socket.socket, peer: PeerName, seconds: float) -> MeasuredPair:
        with self._met(end, peer) as stream:
            speed = measure_stream(stream, self._clock, seconds)
            return MeasuredPair(
                pair=target.pair, speed=speed, mtu=path_mtu(stream), measured_at=self._wall_clock()
            )

    def _met(self, end: socket.socket, peer: PeerName) -> socket.socket:
        """Return the connection once both hosts have proved their identities."""
        deadline = self._clock() + MEET_S
        end.settimeout(MEET_S)
        try:
            stream = under_tls(link_client_context(self._credentials()), end)
            try:
                stream.do_handshake()
                converse(stream, CertifiedDialler(stream, [peer]), deadline, self._clock)
            except BaseException:
                stream.close()
                raise
        except PenstockError:  # raised as it is; some of these are an OSError too
            raise
        except TimeoutError as error:
            raise LinkClosedError(f"it did not answer within {MEET_S:g} s.") from error
        except OSError as error:
            raise refusal(error) from error
        return stream

    def _require_own_cluster(self, peer: PeerName) -> None:
        if peer.cluster != self._peer.cluster:
            raise ProtocolError("paths are measured only between hosts of one cluster.")


def _dial(target: Target) -> Dial:
    return Dial(target.pair.dial_address, target.port, target.pair.bind_address)
