"""Answers visitors at the head: hosts that look whether they could join, before any model is loaded.

Each visit has a thread of its own. Visits are answered one at a time; a visit takes at most `VISIT_S`, its
wait for its turn included. Visits beyond `MOST_VISITS` are refused with an error that says so. A visit does
not disturb the head: it listens at free link ports, dials the visitor, and keeps nothing of the visit.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PeerError, ProtocolError, WaitTimeoutError, describe, error_from_info
from penstock.hosts.agent_wire import MAX_HELLO_BYTES, AgentWire
from penstock.hosts.network.interfaces import unmapped
from penstock.hosts.network.path_finding import wires_between
from penstock.hosts.network.port_check import OpenPorts, unreached_ports
from penstock.hosts.network.scout import Listening, Scout, Target, WayToTry
from penstock.hosts.network.visit_messages import (
    HeadListens,
    LookBack,
    LookedBack,
    ToVisited,
    VisitorListens,
    VisitRefused,
)
from penstock.process.link_ports import PortRange
from penstock.process.readiness import await_readable, await_writable
from penstock.trust.peer_names import PeerName

VISIT_S = 60.0
MOST_VISITS = 4  # visits that are answered or wait for their turn

Answer = TypeVar("Answer")


class Visits:
    """The visits of would-be workers that the head answers, one at a time.

    Args:
        make_scout: makes a scout of this host, given the address by which a visitor has reached it.
        link_ports: range of the link ports of this host.
    """

    def __init__(self, make_scout: Callable[[str], Scout], link_ports: PortRange) -> None:
        self._make_scout = make_scout
        self._link_ports = link_ports
        self._turn = threading.Lock()
        self._places = threading.Semaphore(MOST_VISITS)

    def receive(self, connection: socket.socket, visitor: PeerName) -> None:
        """Answer a visitor whose identity is proved, in a thread that closes the connection; return at once.

        Raises:
            RuntimeError: no thread can be started; the connection stays the caller's.
        """
        wire: AgentWire[ToVisited] = AgentWire(connection, ToVisited, MAX_HELLO_BYTES)
        if not self._places.acquire(blocking=False):
            wire.send(VisitRefused(error=_busy().info()))
            wire.close()
            return
        try:
            told = (connection, wire, visitor)
            threading.Thread(target=self._answer, args=told, name="visit", daemon=True).start()
        except RuntimeError:
            self._places.release()
            raise

    def _answer(self, connection: socket.socket, wire: AgentWire[ToVisited], visitor: PeerName) -> None:
        deadline = time.monotonic() + VISIT_S
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._places.release)
            at_end.callback(wire.close)
            try:
                self._converse(connection, wire, visitor, deadline, at_end)
            except Exception as error:  # such as: the visitor has left or sends nonsense, or no port is free
                wire.send(VisitRefused(error=describe(error)))
            self._send_rest(wire, deadline)

    def _converse(
        self,
        connection: socket.socket,
        wire: AgentWire[ToVisited],
        visitor: PeerName,
        deadline: float,
        at_end: contextlib.ExitStack,
    ) -> None:
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _busy()
        at_end.callback(self._turn.release)
        own, peer = (unmapped(str(name[0])) for name in (connection.getsockname(), connection.getpeername()))
        scout = self._make_scout(own)
        at_end.callback(scout.rest)
        theirs = next_word(wire, VisitorListens, deadline)
        require_own_addresses(theirs, peer)
        listening = scout.listen(visitor)
        ports = OpenPorts(own, self._link_ports)
        at_end.callback(ports.close)
        wire.send(HeadListens(listening=listening, ports=ports.checked))
        next_word(wire, LookBack, deadline)
        survey = scout.survey(visitor, ways_to(listening, theirs.listening, seconds=0.0))
        wire.send(LookedBack(survey=survey, unreached=unreached_ports(theirs.ports, own)))

    def _send_rest(self, wire: AgentWire[ToVisited], deadline: float) -> None:
        """Wait until the visitor has taken what was sent, or has left."""
        while not wire.flush() and wire.failure is None and (left_s := deadline - time.monotonic()) > 0:
            await_writable([wire], left_s)


def require_own_addresses(visitor: VisitorListens, peer: str) -> None:
    """Raise `ProtocolError` if a visitor names addresses that are not its own, as far as that can be seen.

    Otherwise a visitor could make the head dial other hosts. A visitor may have several interfaces, or may
    have fixed another address than the one from which it connects (`--address`). The head cannot see whether
    such addresses are the visitor's own. Therefore:

    - Ports are checked at one address only: the one from which the visitor connects, or one at which it also
      listens to be measured.
    - Of the places to be measured only a few are dialled (`path_finding.wires_between`).
    - A visitor on another machine may not name loopback addresses.

    Args:
        visitor: the visitor's first message.
        peer: the address from which the visitor connects, an IPv4 address in its plain form.
    """
    listens = {place.address.address for place in visitor.listening.places}
    checked = visitor.ports.address.partition("%")[0]
    if visitor.ports.ports and checked != peer.partition("%")[0] and checked not in listens:
        raise ProtocolError("the visiting host names ports at an address where it does not listen.")
    if not _is_loopback(peer) and any(_is_loopback(address) for address in (*listens, checked)):
        raise ProtocolError("the visiting host is on another machine but names loopback addresses.")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _busy() -> PeerError:
    return PeerError(
        f"the head is checking {MOST_VISITS} other hosts.",
        remedy="Run the same command again in a minute.",
        code="too_many_visitors",
    )


def ways_to(own: Listening, other: Listening, seconds: float) -> list[WayToTry]:
    """Return the network paths from this host to another one, as this one dials them.

    Args:
        own, other: where the two hosts listen.
        seconds: how long all of them together are measured.
    """
    ports = {place.address: place.port for place in other.places}
    groups = wires_between(own, other)
    return [
        WayToTry(targets=[Target(pair, ports[pair.other]) for pair in group], seconds=seconds / len(groups))
        for group in groups
    ]


def next_word(wire: AgentWire[Any], expected: type[Answer], deadline: float) -> Answer:
    """Wait for the next message of a visit, and return it.

    Args:
        expected: the type that it must have.
        deadline: by `time.monotonic`.

    Raises:
        PenstockError: the other side has left, is late, refuses the visit, or has sent another message.
    """
    while not (messages := wire.receive()):
        if wire.failure is not None:
            raise wire.failure
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise WaitTimeoutError("the other host has not answered in time.")
        await_readable([wire], left_s)
    if isinstance(messages[0], VisitRefused):
        raise error_from_info(messages[0].error)
    if not isinstance(messages[0], expected):
        raise ProtocolError(f"the other host sent an unexpected {type(messages[0]).__name__}.")
    return messages[0]
