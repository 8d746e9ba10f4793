"""Checks from a would-be worker whether it could join a head, and how good the network is between the two.

The host proves itself as `penstock worker --join` would, with a token or with the certificate of an earlier
join. But it does not join, and the token is not used up. `cli.doctor_join` says what the findings mean.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config.hosts import own_version
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.network.interfaces import addresses_beside, unmapped
from penstock.hosts.network.link_measuring import MEASURING_S
from penstock.hosts.network.port_check import CheckedPorts, OpenPorts, unreached_ports
from penstock.hosts.network.scout import OwnScout, Survey
from penstock.hosts.network.visit_messages import (
    HeadListens,
    LookBack,
    LookedBack,
    ToVisitor,
    VisitorListens,
)
from penstock.hosts.network.visits import VISIT_S, next_word, ways_to
from penstock.process.link_ports import PortRange
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address, JoinedHead, visit
from penstock.trust.peer_names import AGENT_ROLE, VISITOR_ROLE, PeerName
from penstock.trust.tls import link_client_context, token_client_context
from penstock.trust.worker_join import CertificateVisit, TokenVisit


class VisitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a host's visit to a head, to see whether it could join.

    Attributes:
        head: address and port of the head.
        name: name of this host.
        credentials: path of the file of an earlier join; if it does not exist, a token is asked for.
        ports: range of this host's link ports.
        address: address of this host that is fixed for links; empty: any.
    """

    head: Address
    name: str
    credentials: Path
    ports: PortRange
    address: str = ""


class Visited(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a visit to a head, by a host that checks whether it could join.

    Attributes:
        name, head_name: names of this host and of the head.
        own, head: address and link ports at which this host and the head were tried.
        to_head: the network paths to the head, measured.
        from_head: the paths from the head to this host, only tried.
        unreached_at_head: ports of the head that cannot be dialled from here, and why.
        unreached_here: ports of this host that cannot be dialled from the head, and why.
    """

    name: str
    own: CheckedPorts
    head_name: str
    head: CheckedPorts
    to_head: Survey
    from_head: Survey
    unreached_at_head: dict[int, str]
    unreached_here: dict[int, str]


def visit_head(settings: VisitSettings, token: Callable[[], JoinToken]) -> Visited:
    """Prove to a head that this host may join, without joining, and try the network in both directions.

    Args:
        token: asks for the join token; called only if this host has no certificate of the head.

    Raises:
        JoinError: the head does not let this host in: wrong version, token or certificate.
        PeerError: the head cannot be reached, or does not answer.
        UsageError: the token or the certificate cannot be read.
    """
    head, role = _entered(settings, token)
    with contextlib.ExitStack() as at_end:
        wire: AgentWire[ToVisitor] = AgentWire(head.connection, ToVisitor)
        at_end.callback(wire.close)
        deadline = time.monotonic() + VISIT_S
        own = settings.address or str(head.connection.getsockname()[0])
        peer = PeerName(cluster=head.name.cluster, host=settings.name, role=role)
        scout = OwnScout(
            peer, lambda: head.credentials, settings.ports, lambda _: addresses_beside(own), settings.address
        )
        at_end.callback(scout.rest)
        listening = scout.listen(head.name)
        ports = OpenPorts(unmapped(own), settings.ports)
        at_end.callback(ports.close)
        wire.send(VisitorListens(listening=listening, ports=ports.checked))
        theirs = next_word(wire, HeadListens, deadline)
        to_head = scout.survey(head.name, ways_to(listening, theirs.listening, MEASURING_S))
        unreached = unreached_ports(theirs.ports, unmapped(own))
        wire.send(LookBack())
        back = next_word(wire, LookedBack, deadline)
        return Visited(
            name=settings.name,
            own=ports.checked,
            head_name=head.name.host,
            head=theirs.ports,
            to_head=to_head,
            from_head=back.survey,
            unreached_at_head=unreached,
            unreached_here=back.unreached,
        )


def _entered(settings: VisitSettings, token: Callable[[], JoinToken]) -> tuple[JoinedHead, str]:
    """Prove that this host may join the head; return the connection, and the role in its certificate."""
    try:
        credentials = Credentials.load(settings.credentials)
    except FileNotFoundError:
        claim = TokenVisit(token(), settings.name, own_version())
        return visit(settings.head, claim, token_client_context()), VISITOR_ROLE
    again = CertificateVisit(credentials, own_version(), time.time())
    return visit(settings.head, again, link_client_context(credentials)), AGENT_ROLE
