"""Answers visitors at the head: hosts that look whether they could join, before any model is loaded.

Each visit has a thread of its own and at most `VISIT_S`; one is answered at a time. It disturbs nothing: the
head listens at free link ports, dials the visitor, and forgets it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PenstockError, ProtocolError, WaitTimeoutError
from penstock.hosts.agent_wire import AgentWire
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
)
from penstock.process.link_ports import PortRange
from penstock.trust.peer_names import PeerName

VISIT_S = 60.0

Answer = TypeVar("Answer")


class Visits:
    """Args:
    make_scout: makes a scout of this host, given the address by which a visitor has reached it.
    link_ports: of this host.
    """

    def __init__(self, make_scout: Callable[[str], Scout], link_ports: PortRange) -> None:
        self._make_scout = make_scout
        self._link_ports = link_ports
        self._turn = threading.Lock()

    def receive(self, connection: socket.socket, visitor: PeerName) -> None:
        """Answer a visitor whose identity is proved. Returns at once; the connection is closed later."""
        threading.Thread(target=self._answer, args=(connection, visitor), name="visit", daemon=True).start()

    def _answer(self, connection: socket.socket, visitor: PeerName) -> None:
        with contextlib.ExitStack() as at_end:
            wire: AgentWire[ToVisited] = AgentWire(connection, ToVisited)
            at_end.callback(wire.close)
            at_end.enter_context(self._turn)
            own = unmapped(str(connection.getsockname()[0]))
            scout = self._make_scout(own)
            at_end.callback(scout.rest)
            with contextlib.suppress(PenstockError, OSError):  # it has left, or no port is free
                deadline = time.monotonic() + VISIT_S
                theirs = next_word(wire, VisitorListens, deadline)
                listening = scout.listen(visitor)
                ports = OpenPorts(own, self._link_ports)
                at_end.callback(ports.close)
                wire.send(HeadListens(listening=listening, ports=ports.checked))
                next_word(wire, LookBack, deadline)
                survey = scout.survey(visitor, ways_to(listening, theirs.listening, seconds=0.0))
                wire.send(LookedBack(survey=survey, unreached=unreached_ports(theirs.ports, own)))
                while not wire.flush() and time.monotonic() < deadline:
                    select.select([], [wire], [], max(0.0, deadline - time.monotonic()))


def ways_to(own: Listening, other: Listening, seconds: float) -> list[WayToTry]:
    """Return the ways from this host to another one, as this one dials them.

    Args:
        seconds: for which all of them together are measured.
    """
    ports = {place.address: place.port for place in other.places}
    groups = wires_between(own, other)
    return [
        WayToTry(targets=[Target(pair, ports[pair.other]) for pair in group], seconds=seconds / len(groups))
        for group in groups
    ]


def next_word(wire: AgentWire[Any], expected: type[Answer], deadline: float) -> Answer:
    """Wait for the next message of a visit.

    Args:
        deadline: by `time.monotonic`.

    Raises:
        PenstockError: the other side has left, is late, or says something else.
    """
    while not (messages := wire.receive()):
        if wire.failure is not None:
            raise wire.failure
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise WaitTimeoutError("the other host has not answered in time.")
        select.select([wire], [], [], left_s)
    if not isinstance(messages[0], expected):
        raise ProtocolError(f"the other host has said {type(messages[0]).__name__}.")
    return messages[0]
