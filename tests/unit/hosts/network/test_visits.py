"""A host looks whether it could join: proved by its token or certificate, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from clusters import HEAD_HOST, VERSION, Cluster
from penstock.errors import (
    JoinTokenError,
    LinkClosedError,
    OtherVersionError,
    PeerError,
    PenstockError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.hosts.agent_messages import Heartbeat, ToHead
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.network import link_measuring, port_check, visiting
from penstock.hosts.network import visits as visits_module
from penstock.hosts.network.interfaces import HostAddress, Medium, addresses_beside
from penstock.hosts.network.measuring_door import ListeningPlace
from penstock.hosts.network.port_check import CheckedPorts
from penstock.hosts.network.scout import Listening, OwnScout
from penstock.hosts.network.visit_messages import HeadListens, ToVisited, ToVisitor, VisitorListens
from penstock.hosts.network.visiting import VisitSettings, visit_head
from penstock.hosts.network.visits import MOST_VISITS, Visits, next_word, require_own_addresses
from penstock.hosts.worker_gate import WorkerGate
from penstock.process.link_ports import PortRange
from penstock.trust.door import Door
from penstock.trust.head_join import HeadJoin
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import join_with_token
from penstock.trust.peer_names import HEAD_ROLE, PeerName
from penstock.trust.worker_door import worker_door
from real_servers import free_ports


class Head:
    """A head on 127.0.0.1 that waits for workers, and receives visitors."""

    def __init__(self, directory: Path) -> None:
        self.cluster, self._directory = Cluster(directory / "head"), directory
        (first,) = free_ports(1)
        self.ports, self.own_ports = PortRange(first, first + 3), PortRange(first + 10, first + 13)
        self._listener = socket.create_server(("127.0.0.1", 0))
        visits = Visits(self._scout, self.ports)
        self.gate = WorkerGate(self._door, self.cluster.connected, receive_visitor=visits.receive)

    def visit(self, token: JoinToken | None = None) -> visiting.Visited:
        settings = VisitSettings(
            head=self._listener.getsockname(),
            name="desk",
            credentials=self._directory / "desk",
            ports=self.own_ports,
        )
        return visit_head(settings, lambda: token or self.cluster.token)

    def join(self) -> None:
        join_with_token(
            self._listener.getsockname(),
            self.cluster.token,
            host="desk",
            version=VERSION,
            path=self._directory / "desk",
        )

    def _scout(self, address: str) -> OwnScout:
        peer = self.cluster.name(HEAD_HOST, HEAD_ROLE)
        own = self.cluster.head_credentials
        return OwnScout(peer, lambda: own, self.ports, lambda _: addresses_beside(address))

    def _door(self, on_refused: object) -> Door[HeadJoin]:
        cluster = self.cluster
        return worker_door(
            self._listener,
            cluster.identity,
            cluster.book,
            cluster.connected,
            HEAD_HOST,
            VERSION,
            on_refused,  # type: ignore[arg-type]
        )


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setattr(visiting, "MEASURING_S", 0.0)
    monkeypatch.setattr(link_measuring, "LIMIT_S", 60.0)  # that a slow thread may take
    monkeypatch.setattr(visiting, "own_version", lambda: VERSION)
    monkeypatch.setattr(port_check, "MOST_PORTS", 3)
    made = Head(tmp_path)
    yield made
    made.gate.close()


def test_g1_a_visitor_sees_ways_and_ports_both_ways_and_uses_no_token_up(head: Head) -> None:
    for _ in range(2):  # the token is for one worker
        found = head.visit()
        assert (found.name, found.head_name) == ("desk", HEAD_HOST)
        assert [one.pair.own.address for one in found.to_head.open] == ["127.0.0.1"]
        assert [one.pair.own.address for one in found.from_head.open] == ["127.0.0.1"]
        assert found.head.ports
        assert set(found.head.ports) <= set(range(head.ports.first, head.ports.last + 1))
        assert set(found.own.ports) <= set(range(head.own_ports.first, head.own_ports.last + 1))
        assert found.unreached_at_head == found.unreached_here == {}
    assert head.cluster.book.hosts() == []
    head.join()
    assert head.gate.take() == []


def test_g1_a_host_that_has_joined_visits_with_its_certificate(head: Head) -> None:
    head.join()
    head.cluster.book.revoke_all_tokens()
    assert head.visit().to_head.open
    head.cluster.connected.enter("desk")  # a worker runs here, and is not disturbed
    assert head.visit().to_head.open
    head.cluster.book.revoke_host("desk")
    with pytest.raises(PenstockError, match="revoked"):
        head.visit()


def test_r15_a_visitor_without_the_token_sees_nothing(head: Head) -> None:
    with pytest.raises(JoinTokenError):
        head.visit(JoinToken.new(head.cluster.identity.public_key))
    head.join()
    (head._directory / "desk").unlink()
    with pytest.raises(JoinTokenError, match="used up"):
        head.visit()


def test_g1_a_head_of_another_version_is_named(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visiting, "own_version", lambda: "9.9.9")
    with pytest.raises(OtherVersionError, match=r"9\.9\.9"):
        head.visit()


def test_g1_the_other_side_of_a_visit_is_waited_for_and_checked() -> None:
    ours, theirs = socket.socketpair()
    wire, other = AgentWire[ToHead](ours, ToHead), AgentWire[ToHead](theirs, ToHead)
    with pytest.raises(WaitTimeoutError):
        next_word(wire, Heartbeat, 0.0)
    other.send(Heartbeat())
    with pytest.raises(ProtocolError, match="sent an unexpected Heartbeat"):
        next_word(wire, str, time.monotonic() + 60.0)
    other.close()
    with pytest.raises(LinkClosedError):
        next_word(wire, Heartbeat, time.monotonic() + 60.0)
    wire.close()


class SilentScout:
    """A scout that is asked for nothing."""

    def rest(self) -> None: ...


def visitor(head_end: socket.socket, visits: Visits) -> None:
    visits.receive(head_end, PeerName(cluster="0" * 32, host="desk", role="visitor"))


def listens(address: str = "127.0.0.1", checked: str = "127.0.0.1", num_ports: int = 1) -> VisitorListens:
    place = HostAddress(address=address, prefix=8, interface="eth0", medium=Medium.WIRED, mtu=1500)
    return VisitorListens(
        listening=Listening(places=[ListeningPlace(place, 7701)]),
        ports=CheckedPorts(address=checked, ports=[7701] * num_ports, link_ports="7701"),
    )


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_r15_more_visits_than_there_are_places_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visits = Visits(lambda address: SilentScout(), PortRange(0, 0))  # type: ignore[arg-type, return-value]
    wires: list[AgentWire[ToVisitor]] = []
    for _ in range(MOST_VISITS + 1):
        ours, theirs = connected_pair()
        visitor(theirs, visits)
        wires.append(AgentWire(ours, ToVisitor))
    with pytest.raises(PeerError, match=f"checking {MOST_VISITS} other hosts") as caught:
        next_word(wires[-1], HeadListens, time.monotonic() + 60.0)
    assert caught.value.code == "too_many_visitors"
    assert caught.value.remedy
    for wire in wires:
        wire.close()
    for _ in range(MOST_VISITS):  # all places are free again
        assert visits._places.acquire(timeout=30.0)


def test_r15_a_visit_that_does_not_get_its_turn_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits_module, "VISIT_S", 0.0)
    visits = Visits(lambda address: SilentScout(), PortRange(0, 0))  # type: ignore[arg-type, return-value]
    with visits._turn:
        ours, theirs = connected_pair()
        visitor(theirs, visits)
        wire: AgentWire[ToVisitor] = AgentWire(ours, ToVisitor)
        with pytest.raises(PeerError, match="other hosts"):
            next_word(wire, HeadListens, time.monotonic() + 60.0)
    wire.close()


def test_r15_a_visitor_that_says_nonsense_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(lambda address: SilentScout(), PortRange(0, 0))  # type: ignore[arg-type, return-value]
    ours, theirs = connected_pair()
    visitor(theirs, visits)
    wire: AgentWire[ToVisitor] = AgentWire(ours, ToVisitor)
    wire.send(listens(checked="10.9.8.7"))
    with pytest.raises(ProtocolError, match="where it does not listen"):
        next_word(wire, HeadListens, time.monotonic() + 60.0)
    wire.close()


def test_r15_without_a_thread_for_it_a_visit_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    visits = Visits(lambda address: SilentScout(), PortRange(0, 0))  # type: ignore[arg-type, return-value]
    ours, theirs = connected_pair()
    for _ in range(MOST_VISITS + 1):
        with pytest.raises(RuntimeError):
            visitor(theirs, visits)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("said", "peer", "is_let_in"),
    [
        (listens("10.0.0.2", "10.0.0.2"), "10.0.0.2", True),
        (listens("10.0.0.2", "10.0.0.2"), "192.0.2.1", True),  # behind a router that translates addresses
        (listens("10.0.0.2", "10.1.0.2"), "10.1.0.2", True),  # all ports of that interface are taken
        (listens("fe80::2", "fe80::2%eth0"), "fe80::2%eth1", True),
        (listens("10.0.0.2", "10.0.0.9", num_ports=0), "10.0.0.2", True),
        (listens("127.0.0.1", "127.0.0.1"), "127.0.0.1", True),
        (listens("10.0.0.2", "10.0.0.9"), "10.0.0.2", False),
        (listens("127.0.0.1", "10.0.0.2"), "10.0.0.2", False),
        (listens("10.0.0.2", "::1", num_ports=0), "10.0.0.2", False),
        (listens("10.0.0.2", "nonsense:"), "10.0.0.2", False),
    ],
)
def test_r15_a_visitor_names_its_own_addresses_alone(
    said: VisitorListens, peer: str, is_let_in: bool
) -> None:
    with contextlib.nullcontext() if is_let_in else pytest.raises(ProtocolError, match="the visiting host"):
        require_own_addresses(said, peer)


def test_r15_a_visitor_names_few_ports() -> None:
    for said in (listens(num_ports=port_check.MOST_PORTS + 1), listens(checked="1" * 1000)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(said), type=ToVisited)


def test_r15_a_visitor_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        failure = LinkClosedError("it has left.")

        def flush(self) -> bool:
            return False

    def wait(*sources: object) -> None:
        raise AssertionError("nobody will take what is left")

    monkeypatch.setattr(visits_module, "await_writable", wait)
    visits = Visits(lambda address: SilentScout(), PortRange(0, 0))  # type: ignore[arg-type, return-value]
    visits._send_rest(Gone(), time.monotonic() + 60.0)  # type: ignore[arg-type]
